# SPDX-License-Identifier: BSD-3-Clause
"""Every public name is on a page of the site, and every example in a docstring runs by itself."""

from __future__ import annotations

import doctest
import importlib
import inspect
import zlib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import FunctionType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "docs" / "html"
DOXYGEN = ROOT / "build" / "docs" / "doxygen" / "xml"
MODULES = (
    "torchfuse",
    "torchfuse.optimizers",
    "torchfuse.amp",
    "torchfuse.convert",
    "torchfuse.ops",
    "torchfuse.parallel",
    "torchfuse.parallel.flat",
    "torchfuse.apex",
    "torchfuse.apex.native.amp_c",
    "torchfuse.apex.native.apex_c",
    "torchfuse.multi_tensor_apply",
    "torchfuse.testing",
)
# A base class without a formula cannot be shown at work.
WITHOUT_EXAMPLE = {"torchfuse.optimizers.FusedOptimizer"}


def documented(domain: str) -> set[str]:
    """Names in the site's inventory: what its search and its cross-references know."""
    raw = (SITE / "objects.inv").read_bytes()
    header_end = [index for index, byte in enumerate(raw) if byte == ord("\n")][3]
    lines = zlib.decompress(raw[header_end + 1 :]).decode().splitlines()
    entries = [line.rsplit(" ", 4) for line in lines]
    return {entry[0] for entry in entries if entry[1].startswith(f"{domain}:")}


def public_objects() -> Iterator[tuple[str, object]]:
    """Classes and functions by the names under which users find them."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module_name}.{name}", value


def public_python_names() -> set[str]:
    names = {f"{m}.{name}" for m in MODULES for name in importlib.import_module(m).__all__}
    for qualified, value in public_objects():
        names.update(f"{qualified}.{name}" for name in public_methods(value))
    return names


def public_methods(value: object) -> dict[str, object]:
    """Methods and properties that a class of ours defines itself, or in bases without an entry."""
    if not inspect.isclass(value):
        return {}
    kinds = (FunctionType, property, classmethod, staticmethod)
    public = [entry for _, entry in public_objects()]
    own = takewhile(lambda base: base is value or base not in public, value.__mro__)
    return {
        name: member
        for base in own
        if base.__module__.startswith("torchfuse.")
        for name, member in vars(base).items()
        if not name.startswith("_") and isinstance(member, kinds)
    }


def public_cpp_names() -> set[str]:
    """Classes, their public functions and the functions and types of our namespaces."""
    names = set()
    for path in DOXYGEN.glob("*.xml"):
        for compound in ElementTree.parse(path).getroot().iter("compounddef"):
            scope = compound.findtext("compoundname", "")
            if not scope.startswith("torchfuse") or compound.get("kind") not in (
                "class",
                "struct",
                "namespace",
            ):
                continue
            if compound.get("prot", "public") != "public":  # within a class, with its members
                continue
            if compound.get("kind") != "namespace":
                names.add(scope)
            for member in compound.iter("memberdef"):
                simple_name = member.findtext("name", "")
                is_own = member.get("prot") == "public" and member.get("kind") != "friend"
                if is_own and not simple_name.startswith("~"):
                    names.add(f"{scope}::{simple_name}")
    return {name for name in names if "OptimizerState" not in name}


def test_every_public_python_name_has_an_entry() -> None:
    names = public_python_names()
    assert len(names) > 30
    assert names - documented("py") == set()


def test_every_public_method_has_a_docstring() -> None:
    without = [
        f"{qualified}.{name}"
        for qualified, value in public_objects()
        for name, member in public_methods(value).items()
        if not (member.__doc__ or "").strip()
    ]
    assert without == []


def test_every_public_cpp_name_has_an_entry() -> None:
    names = public_cpp_names()
    assert {"torchfuse::fused_adam_", "torchfuse::amp::GradScaler::save"} <= names
    missing = {
        name
        for name in names - documented("cpp")
        # Written once for the class: "Movable, not copyable."
        if not name.endswith(("::operator=",))
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("name", "value"), list(public_objects()), ids=[name for name, _ in public_objects()]
)
def test_every_public_object_has_an_example_that_runs_alone(name: str, value: object) -> None:
    assert inspect.getdoc(value)
    found = [test for test in doctest.DocTestFinder(recurse=False).find(value, name, globs={})]
    examples = [example for test in found for example in test.examples]
    if name in WITHOUT_EXAMPLE:
        assert not examples
        return
    assert examples, f"{name}: expected an example in the docstring, got none"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in found:
        assert runner.run(test).failed == 0
