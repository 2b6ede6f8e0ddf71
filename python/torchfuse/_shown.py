# SPDX-License-Identifier: BSD-3-Clause
"""Formats values for messages, truncating long and deeply nested values."""

from __future__ import annotations

import reprlib
from typing import Any

from torch import Tensor

_MOST = 200


class _Shown(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor) and x.numel() > 8:
            return f"a {x.dtype} tensor of shape {list(x.shape)}"
        return super().repr_instance(x, level)


_repr = _Shown()
_repr.maxlevel = 3
_repr.maxstring = _repr.maxother = _repr.maxlong = _MOST
_repr.maxdict = _repr.maxlist = _repr.maxtuple = 12


def shown(value: Any) -> str:
    """Returns a value's repr, cut after 200 characters because values may come from files."""
    text = _repr.repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."
