# SPDX-License-Identifier: BSD-3-Clause
"""What a module of the alias is: its name, and where its contents come from."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Names of a module, each with the dotted name of the torchfuse module that has it.
Names = Mapping[str, str]


@dataclass(frozen=True)
class AliasModule:
    """A module of the alias.

    Attributes:
        name: full name, as programs import it.
        contents: dotted name of a module, for all names in its `__all__`; or the names, each with
            the module that has it. The modules are imported together with the alias's module, not
            before.
        call: the name in the module that a call of the module itself calls. None: no call.
    """

    name: str
    contents: str | Names = field(default_factory=dict)
    call: str | None = None

    def names(self) -> Names:
        """Returns the names that the module holds, without its submodules."""
        if isinstance(self.contents, str):
            return names_of(self.contents, *importlib.import_module(self.contents).__all__)
        return self.contents

    def objects(self) -> dict[str, Any]:
        """Imports what the module holds, and returns it by name."""
        return {
            name: getattr(importlib.import_module(home), name)
            for name, home in self.names().items()
        }


def names_of(home: str, *names: str) -> Names:
    """Returns `names` as names that the module `home` has."""
    return dict.fromkeys(names, home)
