# SPDX-License-Identifier: BSD-3-Clause
"""Looks up the alias's modules, and words the messages about missing modules and names."""

from __future__ import annotations

from collections.abc import Mapping

from torchfuse.apex._absent import INSTEAD
from torchfuse.apex._contents import MODULES, AliasModule

#: Modules of the alias by name.
modules: Mapping[str, AliasModule] = {module.name: module for module in MODULES}

#: Top-level names of all provided and absent modules.
roots = frozenset(name.partition(".")[0] for name in (*modules, *INSTEAD))


def children(name: str) -> list[str]:
    """Returns the unqualified names of the submodules of `name`."""
    split = (child.rpartition(".") for child in modules)
    return [last for parent, _, last in split if parent == name]


def provided() -> list[str]:
    """Returns the outermost modules that contain names."""
    holding = sorted(name for name, module in modules.items() if module.contents)
    return [name for name in holding if name.rpartition(".")[0] not in holding]


def is_absent_module(name: str) -> bool:
    """Returns whether `name` is, or belongs to, an apex module that torchfuse lacks."""
    return _replacement(name) is not None


def explanation(name: str) -> str:
    """Returns a message that `name` is missing and what to use instead, without a full stop."""
    sentence = f"torchfuse does not provide {name}"
    replacement = _replacement(name)
    if replacement is not None:
        return f"{sentence}; use {replacement}"
    parent = name.rpartition(".")[0]
    if parent in modules and modules[parent].contents:
        called = (child for child in children(parent) if modules[f"{parent}.{child}"].call)
        there = {*modules[parent].names(), *called}
        return f"{sentence}; {parent} provides {_listed(sorted(there))}"
    return f"{sentence}; of apex it provides {_listed(provided())}"


def _replacement(name: str) -> str | None:
    while name and name not in INSTEAD:
        name = name.rpartition(".")[0]
    return INSTEAD.get(name)


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
