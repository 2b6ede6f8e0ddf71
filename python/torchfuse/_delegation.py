# SPDX-License-Identifier: BSD-3-Clause
"""Properties that forward to an attribute of a member object."""

from __future__ import annotations

from typing import Any


def attribute_of(part: str, name: str, doc: str | None = None) -> Any:
    """Returns a property that gets and sets the attribute `name` on `self.<part>`."""

    def get(self: object) -> Any:
        return getattr(getattr(self, part), name)

    def set_in_part(self: object, value: object) -> None:
        setattr(getattr(self, part), name, value)

    return property(get, set_in_part, doc=doc)
