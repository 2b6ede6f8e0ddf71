# SPDX-License-Identifier: BSD-3-Clause
"""Saves and loads a model's weights in safetensors files, for Python, C++ and other projects."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor, nn

from torchfuse._checkpoint_file import StrPath, plain_tensor, replacing
from torchfuse._checkpoint_parts import check_model, load_part, unwrapped

#: Dtypes that both the safetensors format and C++'s load_weights support.
_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}


def save_weights(
    path: StrPath, model: nn.Module, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a model's parameters and buffers to one safetensors file.

    An existing file is replaced atomically, as in `save_checkpoint`. ``torchfuse::load_weights``
    reads the file in C++. The function requires the package safetensors, and memory for a second
    copy of the weights.

    If tensors share memory, the data is written once for each name. So
    ``safetensors.torch.load_file`` returns a dict that ``model.load_state_dict`` accepts, but
    ``safetensors.torch.load_model`` requires ``strict=False``.

    Args:
        path (str | os.PathLike): File to write or replace. A symbolic link is followed.
        model (torch.nn.Module): Module to save. Wrappers from DistributedDataParallel and
            torch.compile are removed.
        metadata (Mapping[str, str] | None, default None): Named texts to store in the file.
            "format" is set to "pt" unless given, because readers in other projects expect that key.

    Raises:
        ValueError: If the format does not support a tensor. The message contains the tensor's name.
        TypeError: If `path`, `model` or `metadata` has a wrong type.
        ImportError: If the package safetensors is not installed.
        OSError: If the file cannot be written. An existing file at `path` is unchanged.

    Example:
        >>> import tempfile, torch, torchfuse
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torchfuse.save_weights(f"{folder}/model.safetensors", model)
        ...     torchfuse.load_weights(f"{folder}/model.safetensors", torch.nn.Linear(2, 1))
        {'format': 'pt'}
    """
    _check_arguments("save_weights", path, model)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(
            f"save_weights: expected metadata to be a dict of texts, got {metadata!r}. Pass "
            "metadata={name: text}."
        )
    texts = {"format": "pt", **(metadata or {})}
    if not all(type(key) is type(text) is str for key, text in texts.items()):
        raise ValueError(
            f"save_weights: expected metadata to have strings as keys and values, got {texts}."
        )
    tensors: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, value in unwrapped(model).state_dict().items():
        tensor = _checked(value, name)
        # safetensors.torch.save() raises for tensors that share memory.
        place = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if place in places else tensor
        places.add(place)
    data = _library("save_weights").save(tensors, metadata=texts)
    with replacing(path, "save_weights") as file:
        file.write(data)


def _check_arguments(caller: str, path: object, model: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{caller}: expected path to be a string or path, got {type(path).__name__}. Pass path "
            "first, then model."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: expected model to be a module, got {type(model).__name__}. Pass the "
            "module, not its state_dict()."
        )


def _checked(value: object, name: str) -> Tensor:
    """Converts a state dict value to a contiguous CPU tensor; ValueError if unsupported."""
    where = f"save_weights: expected {name!r}"
    if name == "__metadata__":
        raise ValueError(f"{where} to have another name: the format reserves this name.")
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{where} to be a tensor, got {type(value).__name__}. safetensors files contain only "
            "tensors. Use save_checkpoint."
        )
    plain = plain_tensor(value, where)
    if plain.dtype not in _DTYPES:
        raise ValueError(
            f"{where} to have a dtype that safetensors files can hold, got {plain.dtype}. Convert "
            "it, or use save_checkpoint."
        )
    return plain.resolve_conj().resolve_neg().cpu().contiguous()


def load_weights(path: StrPath, model: nn.Module) -> dict[str, str]:
    """Loads a safetensors file from `save_weights` or another program into a model.

    The complete file is read and compared with the model before any tensor changes. Then
    ``model.load_state_dict`` loads the values; if it raises, the previous values are restored.
    Values are converted to the model's dtypes and devices. If the model shares a parameter under
    several names, the file needs only one of the names, as ``safetensors.torch.save_model`` writes
    it. The function requires the package safetensors.

    Args:
        path (str | os.PathLike): File to read.
        model (torch.nn.Module): Module to load the values into.

    Returns:
        The file's metadata as a dict of strings.

    Raises:
        ValueError: If the file is truncated or of another format, or if names or shapes differ from
            the model's. The message contains the file and the tensor, and the model is unchanged.
        TypeError: If `path` or `model` has a wrong type.
        ImportError: If the package safetensors is not installed.
        OSError: If the file cannot be read.

    Example:
        >>> import tempfile, torch, torchfuse
        >>> model = torch.nn.Linear(2, 1)
        >>> other = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torchfuse.save_weights(f"{folder}/w.safetensors", model, {"epoch": "3"})
        ...     torchfuse.load_weights(f"{folder}/w.safetensors", other)["epoch"]
        '3'
        >>> torch.equal(other.weight, model.weight)
        True
    """
    _check_arguments("load_weights", path, model)
    where = f"load_weights: expected {os.fsdecode(path)}"
    saved, metadata = _read(path, where)
    module = unwrapped(model)
    own = module.state_dict()
    for name, value in own.items():
        if name in saved or not isinstance(value, Tensor):
            continue
        for other, kept in own.items():
            if other in saved and isinstance(kept, Tensor) and _same_memory(value, kept):
                saved[name] = saved[other]
    check_model(module, saved, where)
    with torch.inference_mode(False), torch.no_grad():
        load_part(module, saved, f"load_weights: {os.fsdecode(path)} does not fit")
    return metadata


def _read(path: StrPath, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the file's tensors and metadata at once, because the file may be replaced."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{where} to be a file, got a folder, pipe or device. Name a file.")
    library = _library("load_weights")
    from safetensors import SafetensorError

    with open(path, "rb") as file:
        data = file.read()
    try:
        saved = dict(library.load(data))
    except (KeyError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{where} to be a whole safetensors file, got a file that is truncated or of another "
            f"format: {error}. Read files of save_checkpoint with load_checkpoint."
        ) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return saved, header.get("__metadata__") or {}


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the model are the same parameter or buffer."""
    return (
        one.data_ptr() == other.data_ptr()
        and (one.device, one.shape, one.stride()) == (other.device, other.shape, other.stride())
        and one.numel() > 0
    )


def _library(caller: str) -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            f"{caller}: expected the package safetensors, got none. Run: pip install safetensors"
        ) from error
    return safetensors.torch
