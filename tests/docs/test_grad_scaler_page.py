# SPDX-License-Identifier: BSD-3-Clause
"""Every test that docs/grad_scaler.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = [
    line
    for line in (ROOT / "docs" / "grad_scaler.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]
PYTHON = sorted({name for line in TABLES for name in re.findall(r"`(test_\w+)`", line)})
CPP = sorted({name for line in TABLES for name in re.findall(r"`([A-Z]\w+\.[A-Z]\w+)`", line)})


def sources(pattern: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob(pattern))


def test_the_page_names_tests_of_both_languages() -> None:
    assert len(PYTHON) >= 30
    assert len(CPP) >= 25


@pytest.mark.parametrize("name", PYTHON)
def test_python_test_exists(name: str) -> None:
    assert f"def {name}(" in sources("python/amp/test_*.py")


@pytest.mark.parametrize("name", CPP)
def test_cpp_test_exists(name: str) -> None:
    suite, _, test = name.partition(".")
    assert f"TEST({suite}, {test})" in sources("cpp/api/amp/test_*.cpp")
