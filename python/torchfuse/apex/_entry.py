# SPDX-License-Identifier: BSD-3-Clause
"""Describes an alias module: the name, and where the contents are defined."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Maps each name in an alias module to the dotted name of the torchfuse module that defines it.
Names = Mapping[str, str]


@dataclass(frozen=True)
class AliasModule:
    """An alias module.

    Attributes:
        name: Full name, as programs import the module.
        contents: A torchfuse module's dotted name, for all names in the module's `__all__`, or a
            mapping from names to defining modules. Importing the alias module imports these
            modules, not before.
        call: Name of the callable to invoke when a program calls the module itself. None: the
            module is not callable (default).
    """

    name: str
    contents: str | Names = field(default_factory=dict)
    call: str | None = None

    def names(self) -> Names:
        """Returns the module's names with the defining modules, without submodules."""
        if isinstance(self.contents, str):
            return names_of(self.contents, *importlib.import_module(self.contents).__all__)
        return self.contents

    def objects(self) -> dict[str, Any]:
        """Imports the module's objects and returns them by name."""
        return {
            name: getattr(importlib.import_module(home), name)
            for name, home in self.names().items()
        }


def names_of(home: str, *names: str) -> Names:
    """Returns a mapping from each of `names` to the module `home`."""
    return dict.fromkeys(names, home)
