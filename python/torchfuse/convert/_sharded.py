# SPDX-License-Identifier: BSD-3-Clause
"""Reads the sharded checkpoints of C++: a folder with a file for each rank.

Note [Sharded checkpoints] in csrc/api/checkpoint/placed_tensor.h describes them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchfuse._checkpoint_file import StrPath, checked_contents, read_plain
from torchfuse.convert._archive import listed

_READ = "read_sharded_checkpoint"
SHARDED_FORMAT = 1
INDEX = "index.pt"


def read_sharded_checkpoint(folder: StrPath) -> dict[str, Any]:
    """Reads a folder that C++ wrote with ``torchfuse::save_sharded_checkpoint``.

    Args:
        folder: the folder with its ``index.pt`` and the files of all ranks.

    Returns:
        What ``torch.load`` returns of a file of `torchfuse.save_checkpoint`: the parts by their
        names, and "values". A split optimizer's part is the state dict of the whole optimizer, as
        its class alone and `torchfuse.parallel.ShardedOptimizer` load it. All tensors are on the
        CPU.

    Raises:
        ValueError: for a file that is missing, truncated, damaged or of another kind, naming it.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchfuse.convert import read_sharded_checkpoint, write_sharded_checkpoint
        >>> from torchfuse.optimizers import FusedAdam
        >>> weight = torch.ones(5, requires_grad=True)
        >>> weight.grad = torch.ones(5)
        >>> optimizer = FusedAdam([weight])
        >>> optimizer.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     parts = {"optimizer": optimizer.state_dict()}
        ...     write_sharded_checkpoint(parts, folder, world_size=2)
        ...     found = read_sharded_checkpoint(folder)
        >>> optimizer.load_state_dict(found["optimizer"])
    """
    folder = os.fspath(folder)
    path = os.path.join(folder, INDEX)
    where = f"{_READ}: expected {path}"
    index = _read(path, where)
    sharded = index.get("sharded") if isinstance(index, dict) else None
    if not isinstance(sharded, dict):
        got = listed(index) if isinstance(index, dict) else type(index).__name__
        raise ValueError(f"{where} to hold 'sharded', got {got}.")
    if sharded.get("format") != SHARDED_FORMAT:
        raise ValueError(
            f"{where} to be of format {SHARDED_FORMAT}, got {sharded.get('format')!r}. Read it "
            "with the version that wrote it."
        )
    contents = checked_contents(index.get("checkpoint"), where)
    pairs = _checked_pairs(sharded.get("files"), where)
    files = [_checked_file(folder, name, size) for name, size in pairs]
    try:
        for name in sharded["optimizers"]:
            state = contents[name]["state"]
            contents[name]["state"] = _joined(state, [of_file[name] for of_file in files])
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(
            f"{where} to describe the tensors in the files of ranks, got other contents: {error}."
        ) from error
    return contents


def _read(path: str, where: str) -> Any:
    try:
        if not os.path.isfile(path):  # a pipe would be waited for
            raise FileNotFoundError
        with open(path, "rb") as file:
            return read_plain(file, where)
    except FileNotFoundError as error:
        raise ValueError(f"{where} to be a file, got none.") from error


def _checked_pairs(pairs: Any, where: str) -> list[tuple[str, int]]:
    """The names and bytes of files, all beside the index."""
    if not isinstance(pairs, list):
        raise ValueError(f"{where} to hold a list of files, got {type(pairs).__name__}.")
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and [type(each) for each in pair] == [str, int]
        if not is_pair or "/" in pair[0]:
            raise ValueError(
                f"{where} to hold pairs of the names of files beside it and bytes, got {pair!r}."
            )
    return pairs


def _checked_file(folder: str, name: str, size: int) -> Any:
    path = os.path.join(folder, name)
    where = f"{_READ}: expected {path}"
    found = size_of(path)
    if found == size:
        try:
            with open(path, "rb") as file:
                return read_plain(file, where)
        except FileNotFoundError:
            found = None
    got = "none" if found is None else f"{found} bytes"
    raise ValueError(
        f"{where} to be a file of {size} bytes, as {INDEX} says, got {got}. Load another "
        "checkpoint, or this one again if it was saved meanwhile."
    )


def size_of(path: StrPath) -> int | None:
    """Bytes of a file; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _joined(state: dict[Any, Any], files: list[dict[Any, Any]]) -> dict[Any, Any]:
    """The states of all parameters with tensors in the place of what says where these are."""
    return {
        param: {
            key: _whole(value, [of_file.get(param, {}).get(key) for of_file in files])
            if isinstance(value, dict)
            else value
            for key, value in entries.items()
        }
        for param, entries in state.items()
    }


def _whole(place: Mapping[str, Any], parts: list[Tensor | None]) -> Tensor:
    """The tensor whose elements lie in the parts, one of each file."""
    dtype = getattr(torch, place["dtype"])
    whole = torch.empty_strided(place["sizes"], place["strides"], dtype=dtype)
    if not is_dense(whole):
        raise LookupError(f"strides {place['strides']} that leave gaps or overlap")
    elements = whole.as_strided((whole.numel(),), (1,))
    reached = 0
    for file, begin, end in place["spans"]:
        part = parts[file] if file >= 0 else None
        follows = begin == reached and part is not None and part.shape == (end - begin,)
        if part is None or part.dtype != dtype or not follows:
            raise LookupError(f"no elements {reached} to {end} of {dtype} in file {file}")
        elements[begin:end] = part
        reached = end
    if reached != whole.numel():
        raise LookupError(f"{reached} of {whole.numel()} elements")
    return whole


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory one behind the other, in the order of any dimensions."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order).is_contiguous()
