# SPDX-License-Identifier: BSD-3-Clause
"""Writes the sharded checkpoints of C++: see Note [Sharded checkpoints], as _sharded.py says."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

import torchfuse
from torchfuse._checkpoint_file import FORMAT, StrPath, checked_contents, plain_values, write_plain
from torchfuse.convert._sharded import INDEX, SHARDED_FORMAT, is_dense

_WRITE = "write_sharded_checkpoint"
#: Names of files that a save makes beside its index, also of those that a killed one was writing.
_LEFT_BEHIND = re.compile(
    r"rank[0-9]+-[0-9a-f]{16}\.pt(\.tmp-[0-9a-f]{16})?|index\.pt\.tmp-[0-9a-f]{16}"
)


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
    if not is_dense(dense):
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
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise ValueError(
            f"{_WRITE}: expected {folder} to be a folder or a new name, got a file or a link to "
            "nothing. Name a folder."
        ) from error
    tag = secrets.token_hex(8)
    written: list[tuple[str, int]] = []
    try:
        for rank, of_file in enumerate(files):
            name = f"rank{rank}-{tag}.pt"
            write_plain(folder / name, of_file, _WRITE)
            written.append((name, _size(folder / name)))
        sharded = {"format": SHARDED_FORMAT, "files": written, "optimizers": optimizers}
        with _locked(folder):
            _check_written(folder, written)
            index = {"sharded": sharded, "checkpoint": contents}
            write_plain(folder / INDEX, index, _WRITE, follow=False)
            _remove_others(folder, tag)
    except Exception:  # no interrupt: it may come when the index already names the files
        for name, _ in written:
            (folder / name).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other saves, C++'s too, out of a folder, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    """Bytes of a file; -1: there is none."""
    return path.stat().st_size if path.is_file() else -1


def _check_written(folder: Path, written: list[tuple[str, int]]) -> None:
    for name, size in written:
        found = _size(folder / name)
        if found != size or size < 0:
            got = "none" if found < 0 else f"{found} bytes"
            raise ValueError(
                f"{_WRITE}: expected {folder / name} to be the file of {size} bytes that was "
                f"written, got {got}. Let no other program save there."
            )


def _remove_others(folder: Path, tag: str) -> None:
    """Removes what saves other than the one with this tag have left in a folder."""
    for path in folder.iterdir():
        if _LEFT_BEHIND.fullmatch(path.name) and f"-{tag}." not in path.name:
            path.unlink(missing_ok=True)
