# SPDX-License-Identifier: BSD-3-Clause
"""What the examples must be, and the precompiled header that they share in tests does not show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cmake_project import ROOT, WORK, configure

EXAMPLES = ROOT / "examples/cpp"
NAMES = sorted(file.parent.name for file in EXAMPLES.glob("*/CMakeLists.txt"))
# measure.cpp is compiled without that header.
SOURCES = sorted(file for file in EXAMPLES.glob("*/*.cpp") if file.name != "measure.cpp")


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_project_of_its_own(name: str, prefix: Path) -> None:
    folder = prefix / "lib/cmake/torchfuse"
    configure(EXAMPLES / name, WORK / "alone" / name, f"-Dtorchfuse_DIR={folder}")


def included_by(file: Path) -> set[str]:
    """What a file includes, itself or by the headers of examples."""
    found: set[str] = set()
    for line in re.findall(r'^#include ([<"].+[>"])$', file.read_text(encoding="utf-8"), re.M):
        found.add(line)
        if line.startswith('"'):
            name = Path(line.strip('"')).name
            beside = file.with_name(name)
            (header,) = [beside] if beside.is_file() else EXAMPLES.glob(f"*/{name}")
            found |= included_by(header)
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_each_source_includes_the_header_that_is_precompiled(source: Path) -> None:
    assert "<torch/torch.h>" in included_by(source)
