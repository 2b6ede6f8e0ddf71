# SPDX-License-Identifier: BSD-3-Clause
"""Values in messages: of a long or deep one, its beginning."""

from __future__ import annotations

import reprlib
from typing import Any

_MOST = 200

_repr = reprlib.Repr()
_repr.maxlevel = 3
_repr.maxstring = _repr.maxother = _repr.maxlong = _MOST
_repr.maxdict = _repr.maxlist = _repr.maxtuple = 12


def shown(value: Any) -> str:
    """Returns the repr of a value that may come from a file, of at most 200 characters."""
    text = _repr.repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."
