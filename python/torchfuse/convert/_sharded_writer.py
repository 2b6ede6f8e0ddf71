# SPDX-License-Identifier: BSD-3-Clause
"""Writes the sharded checkpoints of C++: see Note [Sharded checkpoints], as _sharded.py says."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import torchfuse
from torchfuse._checkpoint_file import FORMAT, StrPath, checked_contents, plain_values, write_plain
from torchfuse.convert._folder_lock import FolderLock
from torchfuse.convert._old_files import OldFiles, remove_files_of
from torchfuse.convert._sharded import INDEX, SHARDED_FORMAT, is_dense, size_of

_WRITE = "write_sharded_checkpoint"


def write_sharded_checkpoint(parts: Mapping[str, Any], folder: StrPath, world_size: int) -> None:
    """Writes a folder that C++ loads with ``torchfuse::load_sharded_checkpoint``.

    The states of optimizers are cut evenly into the files of `world_size` ranks; any number of
    ranks loads them. Everything is written beside what `folder` holds, and its ``index.pt`` is
    replaced at the end, in one step.

    Args:
        parts: what ``torch.load`` returns of a file of `torchfuse.save_checkpoint`, or state dicts
            by the names that the C++ program gives the objects. What has "state" and
            "param_groups" is the state dict of an optimizer.
        folder: to make, or whose checkpoint to replace. The files of ranks that its old index names
            are removed, and what killed saves have left behind that is older than it.
        world_size: number of files.

    Raises:
        ValueError: for values that a checkpoint cannot hold, naming their keys.
        OSError: if a file cannot be written, or if another program holds the folder's lock for more
            than 10 s. The checkpoint is as it was, and no file is left.

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
    if not os.fspath(folder):
        raise ValueError(f"{_WRITE}: expected folder to name one, got an empty name.")
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
    _make(folder)
    tag = secrets.token_hex(8)
    written: list[tuple[str, int | None]] = []
    sharded = {"format": SHARDED_FORMAT, "files": written, "optimizers": optimizers}
    path, before, has_lock = folder / INDEX, None, False
    try:
        for rank, of_file in enumerate(files):
            name = f"rank{rank}-{tag}.pt"
            write_plain(folder / name, of_file, _WRITE)
            written.append((name, size_of(folder / name)))
        with FolderLock(folder, _WRITE):
            before, has_lock = _identity(path), True
            old_files = OldFiles(folder)
            _check_written(folder, written)
            write_plain(path, {"sharded": sharded, "checkpoint": contents}, _WRITE, follow=False)
            old_files.remove(tag)
    except BaseException:
        # An index that is in its place needs them: an interrupt may come at any moment.
        if not has_lock or _identity(path) == before:
            remove_files_of(folder, tag)
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise ValueError(
            f"{_WRITE}: expected {folder} to be a folder or a new name, got a file or a link to "
            "nothing. Name a folder."
        ) from error
    except OSError as error:
        raise OSError(
            error.errno,
            f"{_WRITE}: could not make the folder {folder}: {error.strerror}. Name one in a folder "
            "that exists and may be written.",
        ) from error


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What another file in its place does not share with a file; None: there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_written(folder: Path, written: list[tuple[str, int | None]]) -> None:
    for name, size in written:
        found = size_of(folder / name)
        if found != size or size is None:
            expected = "file" if size is None else f"file of {size} bytes"
            got = "none" if found is None else f"{found} bytes"
            raise ValueError(
                f"{_WRITE}: expected {folder / name} to be the {expected} that was written, got "
                f"{got}. Let no other program save there."
            )
