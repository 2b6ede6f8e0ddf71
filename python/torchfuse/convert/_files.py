# SPDX-License-Identifier: BSD-3-Clause
"""Converts checkpoint files, as `python -m torchfuse convert` does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchfuse import _C
from torchfuse.convert._archive import StrPath, is_archive, replacing
from torchfuse.convert._from_cpp import read_archive
from torchfuse.convert._to_cpp import archive_of

# Keys that torchfuse's state dicts hold only for torch.optim.
_FOR_TORCH = ("capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused")


@dataclass(frozen=True)
class Conversion:
    """A summary of what `convert_checkpoint` converted.

    Attributes:
        optimizer: name of the class, the same in both languages.
        to_cpp: True from Python to C++, False from C++ to Python.
        groups: number of parameter groups.
        params: number of parameters.
        states: number of parameters with a state.
        left_out: keys of parameter groups that the C++ class does not have.

    Example:
        >>> from torchfuse.convert import Conversion
        >>> print(Conversion("FusedAdam", to_cpp=False, groups=2, params=5, states=4))
        FusedAdam from C++ to Python: 2 parameter groups, 5 parameters, 4 of them with state
    """

    optimizer: str
    to_cpp: bool
    groups: int
    params: int
    states: int
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        source, target = ("Python", "C++") if self.to_cpp else ("C++", "Python")
        left_out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return (
            f"{self.optimizer} from {source} to {target}: {self.groups} parameter groups, "
            f"{self.params} parameters, {self.states} of them with state{left_out}"
        )


def convert_checkpoint(
    source: StrPath, target: StrPath, optimizer: str | None = None
) -> Conversion:
    """Converts a C++ archive to a Python file, or a Python file to a C++ archive.

    A C++ archive is written by ``torch::save(optimizer, path)``. A Python file is written by
    ``torch.save(optimizer.state_dict(), path)``; it is loaded with ``weights_only=True``. See
    `read_cpp_archive` and `write_cpp_archive` for what is kept.

    Args:
        source: file to read; its contents determine the direction of the conversion.
        target: file to write or replace, in one step after everything else.
        optimizer: name of the C++ class, only for a Python file. None: determined from the options.

    Returns:
        A summary of the conversion; as a string, it is the line that the command prints.

    Raises:
        ValueError: for a file of neither format, or values that a class rejects; `target` is
            unchanged.
        OSError: if a file cannot be read or written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchfuse.convert import convert_checkpoint
        >>> from torchfuse.optimizers import FusedAdam
        >>> optimizer = FusedAdam([torch.nn.Parameter(torch.ones(2))])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(optimizer.state_dict(), f"{folder}/python.pt")
        ...     conversion = convert_checkpoint(f"{folder}/python.pt", f"{folder}/cpp.pt")
        >>> print(conversion.optimizer, conversion.params)
        FusedAdam 1
    """
    if Path(source).resolve() == Path(target).resolve():
        raise ValueError(
            f"torchfuse.convert: expected source and target to be two files, got {source} twice."
        )
    if is_archive(source):
        if optimizer is not None:
            raise ValueError(
                f"torchfuse.convert: expected no optimizer for the C++ archive {source}, which "
                f"names its class, got {optimizer!r}."
            )
        name, state_dict = read_archive(source)
        with replacing(target) as temporary:
            torch.save(state_dict, temporary)
        return _conversion(name, state_dict, to_cpp=False)
    state_dict = _load(source)
    where = f"torchfuse.convert: expected {os.fspath(source)}"
    name, archive, left_out = archive_of(state_dict, where, optimizer)
    with replacing(target) as temporary:
        _C.write_archive(archive, str(temporary))
    kept = tuple(key for key in left_out if key not in _FOR_TORCH)
    return _conversion(name, state_dict, to_cpp=True, left_out=kept)


def _conversion(name: str, state_dict: dict[str, Any], **rest: Any) -> Conversion:
    groups = state_dict["param_groups"]
    params = sum(len(group["params"]) for group in groups)
    states = sum(bool(saved) for saved in state_dict["state"].values())
    return Conversion(name, groups=len(groups), params=params, states=states, **rest)


def _load(path: StrPath) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.filename is not None:  # missing or not readable
            raise
        raise _foreign(path) from error
    except Exception as error:  # any error of torch for a damaged or foreign file
        raise _foreign(path) from error
    return loaded


def _foreign(path: StrPath) -> ValueError:
    # torch's own message recommends weights_only=False.
    return ValueError(
        f"torchfuse.convert: expected {os.fspath(path)} to be a C++ archive, written by "
        "torch::save(optimizer, path), or a Python file, written by "
        "torch.save(optimizer.state_dict(), path), got one that torch.load refuses with "
        "weights_only=True: truncated, of another kind, or with objects in it."
    )
