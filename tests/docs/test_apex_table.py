# SPDX-License-Identifier: BSD-3-Clause
"""docs/apex.md: its table names classes, functions and arguments of torchfuse that exist."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from torchfuse.apex._absent import INSTEAD
from torchfuse.apex._registry import modules
from torchfuse.optimizers._options import StepOptions

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "apex.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| .* \| `(torchfuse[\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE)


def arguments(value: object) -> set[str]:
    """The names that a class or a function takes."""
    return {*inspect.signature(value).parameters, *get_type_hints(StepOptions)}  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "differences"), ROWS, ids=[name for name, _ in ROWS])
def test_a_row_names_what_exists(name: str, differences: str) -> None:
    value = pkgutil.resolve_name(name)
    named = set(re.findall(r"`(\w+)=\w*`", differences))
    assert not named or named <= arguments(value)


def test_every_optimizer_of_apex_has_a_row() -> None:
    names = {name for name, _ in ROWS}
    files = [name for name in modules if name.startswith("apex.optimizers.fused_")]
    optimizers = {name for file in files for name in modules[file].names()}
    assert {f"torchfuse.optimizers.{name}" for name in optimizers} <= names


def test_what_is_listed_as_absent_is_absent() -> None:
    absent = PAGE.partition("## What is absent")[2]
    listed = set(re.findall(r"`(apex\.\w+)`", absent)) - {"apex.contrib"}
    assert listed
    assert listed <= set(INSTEAD)
    assert not listed & set(modules)
