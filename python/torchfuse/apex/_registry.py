# SPDX-License-Identifier: BSD-3-Clause
"""All modules of the alias, and the sentences about modules and names that are not there."""

from __future__ import annotations

from collections.abc import Mapping

from torchfuse.apex._absent import INSTEAD
from torchfuse.apex._contents import MODULES
from torchfuse.apex._entry import AliasModule

#: All modules of the alias, by name.
modules: Mapping[str, AliasModule] = {module.name: module for module in MODULES}

#: The top-level names that the alias answers for, of provided and of absent modules.
roots = frozenset(name.partition(".")[0] for name in (*modules, *INSTEAD))


def children(name: str) -> list[str]:
    """Returns the last names of the modules directly inside the module `name`."""
    split = (child.rpartition(".") for child in modules)
    return [last for parent, _, last in split if parent == name]


def provided() -> list[str]:
    """Returns the modules that hold names, without those inside another one."""
    holding = sorted(name for name, module in modules.items() if module.contents)
    return [name for name in holding if name.rpartition(".")[0] not in holding]


def is_absent_module(name: str) -> bool:
    """Whether `name` is known as a module of apex, or inside one, that torchfuse lacks."""
    return _replacement(name) is not None


def explanation(name: str) -> str:
    """Returns that a module or a name in one is not there, and what to use; without a full stop."""
    sentence = f"torchfuse does not provide {name}"
    replacement = _replacement(name)
    if replacement is not None:
        return f"{sentence}; use {replacement}"
    parent = name.rpartition(".")[0]
    if parent in modules and modules[parent].contents:
        called = (child for child in children(parent) if modules[f"{parent}.{child}"].call)
        there = {*modules[parent].names(), *called}
        return f"{sentence}; {parent} has {_listed(sorted(there))}"
    return f"{sentence}; of apex it provides {_listed(provided())}"


def _replacement(name: str) -> str | None:
    while name and name not in INSTEAD:
        name = name.rpartition(".")[0]
    return INSTEAD.get(name)


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
