# SPDX-License-Identifier: BSD-3-Clause
"""`_C.pyi` against the native module.

stubtest compares names and kinds, but a pybind11 function has no signature that Python can inspect;
its arguments and their defaults stand in the first line of its docstring.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import torchfuse
from torchfuse import _C

STUB = ast.parse((Path(torchfuse.__file__).parent / "_C.pyi").read_text(encoding="utf-8"))


def stub_functions() -> dict[str, ast.FunctionDef]:
    """Functions and methods of the stub by qualified name; properties have no arguments."""
    found = {}
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            found |= {f"{node.name}.{item.name}": item for item in methods}
    static = ("staticmethod",)
    kinds = {name: tuple(map(ast.unparse, node.decorator_list)) for name, node in found.items()}
    return {name: node for name, node in found.items() if kinds[name] in ((), static)}


def stub_arguments(function: ast.FunctionDef) -> dict[str, str | None]:
    """Each argument's default as written, None where there is none."""
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.unparse(value) for value in function.args.defaults]
    padding: list[str | None] = [None] * (len(names) - len(defaults))
    return dict(zip(names, padding + defaults, strict=True))


def native_arguments(name: str) -> dict[str, str | None]:
    """The same, from the native function's docstring."""
    function: object = _C
    for part in name.split("."):
        function = getattr(function, part)
    line = (function.__doc__ or "").splitlines()[0]
    signature = re.sub(r"torchfuse\._C\.", "", line)
    parsed = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return stub_arguments(parsed)


@pytest.mark.parametrize("name", sorted(stub_functions()))
def test_arguments_and_defaults_are_those_of_the_native_function(name: str) -> None:
    assert stub_arguments(stub_functions()[name]) == native_arguments(name)


def test_every_native_function_is_in_the_stub() -> None:
    native = {name for name, value in vars(_C).items() if callable(value) and name[0] != "_"}
    for owner in [value for value in vars(_C).values() if isinstance(value, type)]:
        methods = (name for name, value in vars(owner).items() if callable(value))
        native |= {f"{owner.__name__}.{name}" for name in methods if not name.startswith("_")}
        native |= {f"{owner.__name__}.__init__"}
        native -= {owner.__name__}
    assert set(stub_functions()) == native
