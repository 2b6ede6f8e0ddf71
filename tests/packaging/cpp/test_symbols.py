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


def top_level_statements(header: Path) -> list[str]:
    """Declarations at namespace scope, which clang-format starts at the margin."""
    text = re.sub(r"//[^\n]*", "", header.read_text(encoding="utf-8"))
    text = re.sub(r"^#(.*\\\n)*.*$", "", text, flags=re.M)
    text = re.sub(r"^(template <.*>)\n", r"\1 ", text, flags=re.M)
    parts = re.split(r"\n(?=[A-Za-z])", re.sub(r"^(namespace|using|}).*$", "", text, flags=re.M))
    return [part.strip() for part in parts if part.strip()]


def is_defined_elsewhere(statement: str) -> bool:
    """Whether it declares functions that it does not define."""
    macro = r"TORCH(FUSE)?_(ARG|MODULE)\((?:[^()]|\([^()]*\))*\)"
    # Constructors in one line, whose calls look like declarations.
    defined = r"\)\s*:[^;{}]*\{[^{}]*\}"
    arguments = r"=[^=,(){};]*(\([^()]*\))?(?=[,)])"
    body = re.sub(rf"{macro}|{defined}|=\s*(default|delete)|{arguments}", "", statement)
    body = re.sub(r"=[^;{}]*(?=;)", "", body)
    own_template = statement.startswith("template ") and "TORCHFUSE_API" not in statement
    inline = statement.startswith("inline ") or own_template
    return not inline and re.search(r"\)(\s*(const|noexcept|override))*\s*;", body) is not None


def exported_names(header: Path) -> list[str]:
    """Patterns of classes and functions that TORCHFUSE_API marks, and of templates made here."""
    statements = top_level_statements(header)
    text = "\n".join(filter(is_defined_elsewhere, statements))
    classes = re.findall(r"\b(?:class|struct) TORCHFUSE_API (\w+)", text)
    functions = re.findall(r"^TORCHFUSE_API [^(;{]*?(\w+)\(", text, re.MULTILINE)
    made = re.findall(r"^extern template \w+ (\w+)<(\w+)", "\n".join(statements), re.MULTILINE)
    return classes + functions + [rf"{name}<torchfuse::(\w+::)*{of}" for name, of in made]


def test_only_our_symbols_leave_the_library(symbols: list[str]) -> None:
    assert [symbol for symbol in symbols if not OURS.match(symbol)] == []


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: str(path.relative_to(PUBLIC)))
def test_what_the_header_declares_is_exported(header: Path, symbols: list[str]) -> None:
    names = exported_names(header)
    defines_all = not any(map(is_defined_elsewhere, top_level_statements(header)))
    assert names or defines_all
    for name in names:
        pattern = re.compile(rf"^torchfuse::(\w+::)*{name}(\(|::|\[|<|>|,)")
        assert any(pattern.match(symbol) for symbol in symbols), f"{name} is not exported"


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: str(path.relative_to(PUBLIC)))
def test_what_is_defined_in_the_library_is_marked(header: Path) -> None:
    """Without TORCHFUSE_API a program could not link what it sees declared."""
    unmarked = [s for s in top_level_statements(header) if "TORCHFUSE_API" not in s]
    assert [s for s in unmarked if is_defined_elsewhere(s)] == []


def test_every_public_header_is_installed(prefix: Path) -> None:
    """One that csrc/CMakeLists.txt does not list is neither installed nor compiled alone."""
    installed = {str(path.relative_to(prefix / "include")) for path in prefix.rglob("*.h")}
    generated = {"torchfuse/export.h", "torchfuse/version.h"}
    assert installed == {str(header.relative_to(PUBLIC)) for header in HEADERS} | generated


def test_the_umbrella_header_includes_the_others() -> None:
    """Headers that others include for their own needs are named by those."""
    included = {
        name
        for header in HEADERS
        for name in re.findall(r"#include <(torchfuse/[^>]+)>", header.read_text(encoding="utf-8"))
    }
    assert {str(h.relative_to(PUBLIC)) for h in HEADERS} - {"torchfuse/torchfuse.h"} <= included


def test_version_header(prefix: Path) -> None:
    text = (prefix / "include/torchfuse/version.h").read_text(encoding="utf-8")
    defined = dict(re.findall(r"^#define TORCHFUSE_(\w+) (.*)$", text, re.MULTILINE))
    parts = dict(zip(("MAJOR", "MINOR", "PATCH"), VERSION.split("."), strict=True))
    assert defined == {
        **{f"VERSION_{part}": value for part, value in parts.items()},
        "VERSION": f'"{VERSION}"',
        "TORCH_VERSION": f'"{torch.__version__}"',
    }
