# SPDX-License-Identifier: BSD-3-Clause
"""Converts folders of sharded checkpoints, as `python -m torchfuse convert` does."""

from __future__ import annotations

import os
from typing import Any

from torchfuse._checkpoint_file import StrPath, read_checkpoint, write_plain
from torchfuse.convert._sharded import read_sharded_checkpoint
from torchfuse.convert._sharded_writer import write_sharded_checkpoint

_CALLER = "convert_sharded_checkpoint"


def convert_sharded_checkpoint(
    source: StrPath, target: StrPath, world_size: int | None = None
) -> str:
    """Converts a folder of C++'s ``save_sharded_checkpoint`` to one file, or a file to a folder.

    The file is one of `torchfuse.save_checkpoint`, which `torchfuse.load_checkpoint` and C++ load.

    Args:
        source: folder or file to read; which of both it is determines the direction.
        target: file or folder to write or replace, in one step after everything else.
        world_size: number of ranks whose files the folder gets, only from a file to a folder.

    Returns:
        A summary of the conversion: the line that the command prints.

    Raises:
        ValueError: without `world_size` for a file, or with it for a folder; for files that are
            missing, damaged or of another kind. `target` is unchanged.
        OSError: if a file cannot be read or written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchfuse import save_checkpoint
        >>> from torchfuse.convert import convert_sharded_checkpoint
        >>> model = torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     save_checkpoint(f"{place}/checkpoint.pt", model=model)
        ...     convert_sharded_checkpoint(f"{place}/checkpoint.pt", f"{place}/folder", 2)
        ...     convert_sharded_checkpoint(f"{place}/folder", f"{place}/again.pt")
        'model from a file to a folder for 2 ranks'
        'model from a folder to a file'
    """
    if os.path.isdir(source):
        if world_size is not None:
            raise ValueError(
                f"{_CALLER}: expected no world_size for the folder {os.fspath(source)}, which "
                f"becomes one file, got {world_size}."
            )
        contents = read_sharded_checkpoint(source)
        write_plain(target, contents, _CALLER)
        return f"{_names(contents)} from a folder to a file"
    if world_size is None:
        raise ValueError(
            f"{_CALLER}: expected world_size for the file {os.fspath(source)}, which becomes a "
            "folder with a file for each rank, got none."
        )
    contents = read_checkpoint(source, f"{_CALLER}: expected {os.fspath(source)}")
    write_sharded_checkpoint(contents, target, world_size)
    return f"{_names(contents)} from a file to a folder for {world_size} ranks"


def _names(contents: dict[str, Any]) -> str:
    """What a checkpoint holds, as save_checkpoint was given it."""
    parts = [name for name in contents if name not in ("torchfuse", "values")]
    return ", ".join([*parts, *contents["values"]]) or "nothing"
