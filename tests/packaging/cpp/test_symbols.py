# SPDX-License-Identifier: BSD-3-Clause
"""What leaves the library is what the public headers declare: no less, and nothing of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cmake_project import ROOT, VERSION, run

PUBLIC = ROOT / "csrc/include"
HEADERS = sorted(PUBLIC.rglob("*.h"))
OURS = re.compile(
    r"((typeinfo( name)?|vtable) for |(non-virtual |virtual )?thunk to )?torchfuse::(?!kernels::)"
)


@pytest.fixture(scope="module")
def symbols(prefix: Path) -> list[str]:
    """Demangled names that libtorchfuse.so defines for others."""
    listing = run("nm", "-DC", "--defined-only", prefix / "lib/libtorchfuse.so")
    return [line.split(maxsplit=2)[2] for line in listing.splitlines()]


def test_only_our_symbols_leave_the_library(symbols: list[str]) -> None:
    assert [symbol for symbol in symbols if not OURS.match(symbol)] == []


def test_every_public_header_is_installed(prefix: Path) -> None:
    """One that csrc/CMakeLists.txt does not list is neither installed nor compiled alone."""
    installed = {str(path.relative_to(prefix / "include")) for path in prefix.rglob("*.h")}
    generated = {"torchfuse/export.h", "torchfuse/version.h"}
    assert installed == {str(header.relative_to(PUBLIC)) for header in HEADERS} | generated


def test_version_header(prefix: Path) -> None:
    text = (prefix / "include/torchfuse/version.h").read_text(encoding="utf-8")
    defined = dict(re.findall(r"^#define TORCHFUSE_(\w+) (.*)$", text, re.MULTILINE))
    parts = dict(zip(("MAJOR", "MINOR", "PATCH"), VERSION.split("."), strict=True))
    assert defined == {
        **{f"VERSION_{part}": value for part, value in parts.items()},
        "VERSION": f'"{VERSION}"',
        "TORCH_VERSION": f'"{torch.__version__}"',
    }
