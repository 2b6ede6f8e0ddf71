# SPDX-License-Identifier: BSD-3-Clause
"""What reading and writing of C++ archives share.

Note [The native classes describe their archives]
Which options and states an archive holds, with which types and bounds, is known to the C++ classes
alone. `_C.OptimizerClass` hands that out, so a new class needs no line here, and what is written
has passed the checks of the class that will read it.
"""

from __future__ import annotations

import math
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._checks import check_step

StrPath = str | os.PathLike[str]

#: Options that are one pair, or None, in Python, and two in C++, of which the second may be none.
BOUNDS = {"trust_ratio_bounds": ("min_trust_ratio", "max_trust_ratio")}


def to_cpp_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options under the names that they have in C++."""
    options = dict(group)
    for pair, (low, high) in BOUNDS.items():
        if pair in options:
            bounds = options.pop(pair) or (0.0, math.inf)
            options[low] = bounds[0]
            options[high] = None if float(bounds[1]) == math.inf else bounds[1]
    return options


def to_python_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse."""
    group = dict(options)
    for pair, (low, high) in BOUNDS.items():
        if low in group and high in group:
            least, most = group.pop(low), group.pop(high)
            limited = least != 0.0 or most is not None
            group[pair] = (least, math.inf if most is None else most) if limited else None
    return group


@contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """A file to write, which then replaces `path`; an error leaves `path` as it was.

    Where `path` is a symbolic link, the file that it points to is replaced, as by torch.save.
    """
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        # Of the same name: torch writes it into the file.
        temporary = Path(folder) / target.name
        yield temporary
        temporary.replace(target)


def is_archive(path: StrPath) -> bool:
    """Whether the file is a TorchScript container, as those that C++ writes."""
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as container:
                return any(name.endswith("/constants.pkl") for name in container.namelist())
        except zipfile.BadZipFile:
            return False


def check_state(
    saved: Any, optimizer_class: _C.OptimizerClass, required: Sequence[str], where: str
) -> None:
    """Requires the states of one parameter: all that are needed, and no other."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"{where} to be a state, got {type(saved).__name__}.")
    known = ["step", *optimizer_class.states, "master_param", "param_remainder"]
    for key in ("step", *required):
        if key not in saved:
            raise ValueError(f"{where} to hold {key!r}, got {listed(saved)}.")
    for key, value in saved.items():
        if key not in known:
            raise ValueError(
                f"{where} to hold states of {optimizer_class.name}, {listed(known)}, got {key!r}."
            )
        if key != "step" and not isinstance(value, Tensor):
            raise ValueError(f"{where} to hold {key!r} as a tensor, got {type(value).__name__}.")
    check_step(f"{where} to hold 'step' as", saved["step"])


def listed(names: Any, most: int = 12) -> str:
    """Names for a message, the first of many."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return f"[{', '.join(ordered[:most])}]{more}"
