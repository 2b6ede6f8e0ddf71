# SPDX-License-Identifier: BSD-3-Clause
"""Reads and writes the sharded checkpoints of C++: a folder with a file for each rank.

Note [Sharded checkpoints] in csrc/api/checkpoint/placed_tensor.h describes them.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchfuse
from torchfuse._checkpoint_file import (
    FORMAT,
    StrPath,
    checked_contents,
    plain_values,
    read_plain,
    write_plain,
)
from torchfuse.convert._archive import listed

_READ = "read_sharded_checkpoint"
_WRITE = "write_sharded_checkpoint"
_SHARDED_FORMAT = 1
_INDEX = "index.pt"
#: Names of files that a save makes beside its index, also of those that a killed one was writing.
_LEFT_BEHIND = re.compile(
    r"rank[0-9]+-[0-9a-f]{16}\.pt(\.tmp-[0-9a-f]{16})?|index\.pt\.tmp-[0-9a-f]{16}"
)


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
    path = os.path.join(folder, _INDEX)
    where = f"{_READ}: expected {path}"
    index = _read(path, where)
    sharded = index.get("sharded") if isinstance(index, dict) else None
    if not isinstance(sharded, dict):
        got = listed(index) if isinstance(index, dict) else type(index).__name__
        raise ValueError(f"{where} to hold 'sharded', got {got}.")
    if sharded.get("format") != _SHARDED_FORMAT:
        raise ValueError(
            f"{where} to be of format {_SHARDED_FORMAT}, got {sharded.get('format')!r}. Read it "
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
    if not os.path.isfile(path):
        raise ValueError(f"{where} to be a file, got none.")
    with open(path, "rb") as file:
        return read_plain(file, where)


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
    got = f"{os.path.getsize(path)} bytes" if os.path.isfile(path) else "none"
    if got != f"{size} bytes":
        raise ValueError(
            f"{_READ}: expected {path} to be a file of {size} bytes, as {_INDEX} says, got {got}. "
            "Load another checkpoint."
        )
    return _read(path, f"{_READ}: expected {path}")


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
    if not _is_dense(whole):
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


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory one behind the other, in the order of any dimensions."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order).is_contiguous()


def write_sharded_checkpoint(parts: Mapping[str, Any], folder: StrPath, world_size: int) -> None:
    """Writes a folder that C++ loads with ``torchfuse::load_sharded_checkpoint``.

    The states of optimizers are cut evenly into the files of `world_size` ranks; any number of
    ranks loads them. Everything is written beside what `folder` holds, and its ``index.pt`` is
    replaced at the end, in one step.

    Args:
        parts: what ``torch.load`` returns of a file of `torchfuse.save_checkpoint`, or state dicts
            by the names that the C++ program gives the objects. What has "state" and
            "param_groups" is the state dict of an optimizer.
        folder: to make, or whose checkpoint to replace. Files of ranks that its new index does not
            name are removed.
        world_size: number of files.

    Raises:
        ValueError: for values that a checkpoint cannot hold, naming their keys.
        OSError: if a file cannot be written. The checkpoint is as it was, and no file is left.

    Example:
        >>> import os, tempfile
        >>> import torch
        >>> from torchfuse.convert import write_sharded_checkpoint
        >>> from torchfuse.optimizers import FusedAdam
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = FusedAdam(model.parameters())
        >>> parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_sharded_checkpoint({**parts, "values": {"epoch": 3}}, folder, world_size=2)
        ...     len(os.listdir(folder))
        3
    """
    if world_size < 1:
        raise ValueError(f"{_WRITE}: expected world_size to be at least 1, got {world_size}.")
    where = f"{_WRITE}: expected parts"
    contents = plain_values(dict(parts), where)
    about = {"format": FORMAT, "version": torchfuse.__version__, "classes": {}}
    contents = {"values": {}, "torchfuse": about, **contents}
    checked_contents(contents, where)
    _check_names(contents, where)
    _check_names(contents["values"], f"{where}['values']")
    files: list[dict[str, Any]] = [{} for _ in range(world_size)]
    optimizers = [name for name, part in contents.items() if _is_of_optimizer(part)]
    for name in optimizers:
        state = contents[name]["state"]
        for of_file in files:
            of_file[name] = {param: {} for param in state}
        contents[name] = {
            **contents[name],
            "state": {
                param: {
                    key: _placed(value, [of_file[name][param] for of_file in files], key)
                    for key, value in entries.items()
                }
                for param, entries in state.items()
            },
        }
    _write(Path(folder), contents, files, optimizers)


def _check_names(names: Mapping[Any, Any], where: str) -> None:
    for key in names:
        if type(key) is not str:
            raise ValueError(f"{where} to have strings as keys, got {key!r}. Save str(key).")


def _is_of_optimizer(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and isinstance(part.get("state"), dict)
        and all(isinstance(entries, dict) for entries in part["state"].values())
        and isinstance(part.get("param_groups"), list)
    )


def _placed(value: Any, parts: list[dict[str, Any]], key: Any) -> Any:
    """Gives each file its elements. Returns where they are; one number stays where it is."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    dense = value.detach().cpu()
    if not _is_dense(dense):
        dense = dense.contiguous()
    elements = dense.as_strided((dense.numel(),), (1,))
    spans, begin = [], 0
    size = -(-dense.numel() // len(parts))
    for file, part in enumerate(parts):
        end = min(begin + size, dense.numel())
        if begin < end:
            part[key] = elements[begin:end].clone()
            spans.append((file, begin, end))
        begin = end
    return {
        "dtype": str(dense.dtype).removeprefix("torch."),
        "sizes": tuple(dense.shape),
        "strides": dense.stride(),
        "spans": spans,
    }


def _write(
    folder: Path, contents: dict[str, Any], files: list[dict[str, Any]], optimizers: list[str]
) -> None:
    folder.mkdir(exist_ok=True)
    before = [path for path in folder.iterdir() if _LEFT_BEHIND.fullmatch(path.name)]
    tag = secrets.token_hex(8)
    written: list[tuple[str, int]] = []
    try:
        for rank, of_file in enumerate(files):
            name = f"rank{rank}-{tag}.pt"
            write_plain(folder / name, of_file, _WRITE)
            written.append((name, (folder / name).stat().st_size))
        sharded = {"format": _SHARDED_FORMAT, "files": written, "optimizers": optimizers}
        write_plain(folder / _INDEX, {"sharded": sharded, "checkpoint": contents}, _WRITE)
    except Exception:  # no interrupt: it may come when the index already names the files
        for name, _ in written:
            (folder / name).unlink(missing_ok=True)
        raise
    for path in before:
        path.unlink(missing_ok=True)
