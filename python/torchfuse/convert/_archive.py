# SPDX-License-Identifier: BSD-3-Clause
"""Functions that reading and writing of C++ archives share.

Note [The native classes describe their archives]
Only the C++ classes define which options and states an archive holds, with their types and bounds.
`_C.OptimizerClass` provides these definitions, so a new class needs no code here, and a written
archive has passed the checks of the class that will read it.
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
from torchfuse._checkpoint_file import marked_as_folder
from torchfuse.optimizers._checks import check_step
from torchfuse.optimizers._ema import EMA
from torchfuse.optimizers._masters import MASTER_DTYPES
from torchfuse.optimizers.fused_sgd import START

StrPath = str | os.PathLike[str]

#: Options that are a pair or None in Python, and two options in C++, the second of them optional.
BOUNDS = {"trust_ratio_bounds": ("min_trust_ratio", "max_trust_ratio")}

#: States that parameters of any class may have.
EVERY_CLASS = (*MASTER_DTYPES, EMA)


def to_cpp_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's options under their C++ names."""
    options = dict(group)
    for pair, (low, high) in BOUNDS.items():
        if pair in options:
            bounds = options.pop(pair) or (0.0, math.inf)
            options[low] = bounds[0]
            options[high] = None if float(bounds[1]) == math.inf else bounds[1]
    return options


def to_python_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns C++ options under the names of a Python group."""
    group = dict(options)
    for pair, (low, high) in BOUNDS.items():
        if low in group and high in group:
            least, most = group.pop(low), group.pop(high)
            limited = least != 0.0 or most is not None
            group[pair] = (least, math.inf if most is None else most) if limited else None
    return group


@contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Yields a file to write, which then replaces `path`; after an error, `path` is unchanged.

    If `path` is a symbolic link, the file that it points to is replaced, as by torch.save.
    """
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        # The name is the same, because torch writes it into the file.
        temporary = Path(folder) / target.name
        yield temporary
        temporary.replace(target)


def is_archive(path: StrPath) -> bool:
    """Whether the file is a TorchScript container, the format that C++ writes."""
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as container:
                if marked := marked_as_folder(container):
                    raise ValueError(
                        f"torchfuse.convert: expected {os.fspath(path)} to hold files alone, got "
                        f"{marked!r}, which is marked as a folder: it is damaged."
                    )
                return any(name.endswith("/constants.pkl") for name in container.namelist())
        except zipfile.BadZipFile:
            return False


def check_state(
    saved: Any, optimizer_class: _C.OptimizerClass, required: Sequence[str], where: str
) -> None:
    """Checks the state of one parameter: it has all required entries and no unknown ones."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"{where} to be a state, got {type(saved).__name__}.")
    known = ["step", *optimizer_class.states, *EVERY_CLASS]
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
    for key in ("step", *({START} & set(saved))):
        check_step(f"{where} to hold {key!r} as", saved[key])


def listed(names: Any, most: int = 12) -> str:
    """Formats names for a message; of many names, only the first."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return f"[{', '.join(ordered[:most])}]{more}"
