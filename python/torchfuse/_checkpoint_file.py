# SPDX-License-Identifier: BSD-3-Clause
"""Reads checkpoint files and writes them atomically; the files contain plain values only."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchfuse import _C
from torchfuse._shown import shown

StrPath = str | os.PathLike[str]

FORMAT = 1

#: Maximum nesting depth of values. C++ reads at most 100 levels, and a tensor needs some of them.
_MOST_NESTED = 96


def plain_values(value: Any, where: str, depth: int = 0) -> Any:
    """Converts a value to plain types that torch.load(weights_only=True) reads, or raises.

    `where` begins the error messages.
    """
    if depth >= _MOST_NESTED:
        raise ValueError(
            f"{'['.join(where.split('[')[:3])} to be nested at most {_MOST_NESTED} levels deep, "
            "got a deeper value or one that contains itself. Save a flat list instead."
        )
    if isinstance(value, Tensor):
        return plain_tensor(value, where)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str and not (type(key) is int and _fits(key)):
                raise ValueError(
                    f"{where} to have strings or 64-bit ints as keys, got {key!r}. Use str(key)."
                )
        plain = {
            key: plain_values(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()
        }
        return Counter(plain) if isinstance(value, Counter) else plain
    if isinstance(value, list | tuple):
        items = [
            plain_values(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)
        ]
        return items if isinstance(value, list) else tuple(items)
    if value is None or type(value) in (bool, str) or isinstance(value, torch.dtype):
        return value
    if isinstance(value, Integral):
        if not _fits(int(value)):
            raise ValueError(f"{where} to be a 64-bit int, got {value}. Save str(value).")
        return int(value)
    if isinstance(value, Real):  # includes NumPy's numbers
        return float(value)
    of_numpy = type(value).__module__ == "numpy"
    if of_numpy and getattr(value, "shape", None) == () and type(value).__name__ == "ndarray":
        return plain_values(value.item(), where, depth)
    if of_numpy and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    remedy = "an array with torch.from_numpy()" if of_numpy else "for example to a string"
    raise ValueError(
        f"{where} to be None, a bool, number, string or tensor, or a tuple, list or dict of them, "
        f"got {type(value).__name__}. Convert the value, {remedy}."
    )


def _fits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def plain_tensor(value: Tensor, where: str) -> Tensor:
    """Converts a tensor to a dense torch.Tensor with the same values; ValueError if impossible."""
    name = type(value).__name__
    if is_traceable_wrapper_subclass(value):
        raise ValueError(
            f"{where} to be a plain tensor, got {name}. Save sharded models with "
            "torch.distributed.checkpoint."
        )
    if is_lazy(value):
        raise ValueError(f"{where} to have a shape, got a lazy tensor. Run the model once.")
    if value.layout != torch.strided or value.is_quantized:
        got = value.dtype if value.is_quantized else value.layout
        raise ValueError(f"{where} to be a dense tensor, got {got}.")
    if value.is_meta:
        raise ValueError(f"{where} to have values, got a tensor on the meta device.")
    if type(value) is not Tensor and not isinstance(value, Parameter) and vars(value):
        raise ValueError(
            f"{where} to be a plain tensor, got {name} with the attributes {sorted(vars(value))}. "
            "Save value.as_subclass(torch.Tensor), and the attributes as separate values."
        )
    # C++ reads raw bytes: it ignores the conjugate and negative bits, and requires a storage whose
    # size is a multiple of the element size.
    plain = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return plain.clone() if plain.untyped_storage().nbytes() % plain.itemsize else plain


class _Drain:
    """Defers write errors, because torch's writer ends the process if a late write fails."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except BaseException as error:  # includes KeyboardInterrupt
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Does nothing, because `replacing` flushes the file at the end."""


class _Checksums:
    """Enables torch's process-wide CRC-32 option while at least one thread is in the context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.serialization.get_crc32_options()
                torch.serialization.set_crc32_options(True)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.serialization.set_crc32_options(self._before)


_checksums = _Checksums()


def write_checkpoint(path: StrPath, contents: Mapping[str, Any]) -> None:
    """Writes a checkpoint with CRC-32s, so that loading detects damaged files."""
    for key in contents["values"]:
        if type(key) is not str:
            raise ValueError(
                f"save_checkpoint: expected values to have strings as keys, got {key!r}. Use "
                "str(key)."
            )
    plain = plain_values(contents, "save_checkpoint: expected the checkpoint")
    with _checksums, replacing(path, "save_checkpoint") as file:
        _save(plain, file)


def _save(plain: Any, file: _Drain) -> None:
    try:
        torch.save(plain, file)  # type: ignore[arg-type]  # torch.save only calls write()
    except (KeyError, RuntimeError) as error:  # a dtype that torch.save does not support
        if type(error) not in (KeyError, RuntimeError):  # a subclass, such as OutOfMemoryError
            raise
        if error.__context__ is not None and not isinstance(error.__context__, Exception):
            raise error.__context__ from None  # an interrupt that torch replaced with RuntimeError
        raise ValueError(
            f"save_checkpoint: expected tensors that torch.save supports, got: {error}"
        ) from error


def _permissions(path: StrPath, target: str, caller: str) -> int | None:
    """Returns the permissions of the file to replace, or None if there is no such file."""
    try:
        mode = os.stat(target).st_mode
    except OSError:  # if the path is invalid, creating the temporary file raises a clear error
        return None
    if not stat.S_ISREG(mode):
        got = (
            "a folder. Name a file in it" if stat.S_ISDIR(mode) else "a pipe or device. Name a file"
        )
        raise ValueError(f"{caller}: expected {os.fspath(path)} to be a file, got {got}.")
    return stat.S_IMODE(mode) & 0o777


@contextmanager
def replacing(path: StrPath, caller: str) -> Iterator[_Drain]:
    """Yields a temporary file, which atomically replaces `path` once its bytes are on the disk.

    If `path` is a symbolic link, the link's target is replaced. Errors name `caller`.
    """
    target = os.path.realpath(path)
    permissions = _permissions(path, target, caller)
    temporary = f"{target}.tmp-{secrets.token_hex(8)}"
    is_complete = False
    try:
        with open(temporary, "xb") as file:
            if permissions is not None:
                with suppress(OSError):  # some file systems have no permissions
                    os.fchmod(file.fileno(), permissions)
            drain = _Drain(file)
            yield drain
            if drain.error is not None:
                raise drain.error
            file.flush()
            os.fsync(file.fileno())
        is_complete = True
        os.replace(temporary, target)
    except BaseException as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            reason = os.strerror(error.errno)
            if is_complete and error.errno == errno.ENOENT:
                reason = f"another program has removed {temporary}"
            raise OSError(
                error.errno,
                f"{caller}: could not write {target}: {reason}. An existing file is unchanged.",
            ) from error
        raise
    # The file is in place already, so failing to sync its folder is not an error.
    with suppress(OSError):
        folder = os.open(os.path.dirname(target) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_checkpoint(path: StrPath, where: str) -> tuple[dict[str, Any], str]:
    """Returns a checkpoint's contents, with tensors on the CPU, and a digest of the file."""
    with _opened(path, where) as file:  # opened only once, because the file may be replaced
        contents, digest = _read(file, where)
        return _checked_contents(contents, where), digest


def _opened(path: StrPath, where: str) -> BinaryIO:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ValueError(f"{where} to be a file, got a folder. Name the file in it.")
        if not stat.S_ISREG(mode):  # opening a pipe would block until there is a writer
            raise ValueError(f"{where} to be a file, got a pipe or device. Name a file.")
        return open(path, "rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: StrPath, error: OSError) -> OSError:
    where = f"load_checkpoint: could not read {os.fspath(path)}"
    return OSError(error.errno, f"{where}: {error.strerror}")


def _read(file: BinaryIO, where: str) -> tuple[Any, str]:
    """Returns the unpickled contents, with tensors on the CPU, and a digest of the file."""
    with _reading(file, where), zipfile.ZipFile(file) as container:
        entries = container.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed, which torch.save does not do")
        # torch would return garbage values for an entry that is marked as a folder.
        folders = (it.filename for it in entries if it.external_attr & 0x10 or it.is_dir())
        # torch's reader does not check CRC-32s, but testzip() does.
        damaged = next(folders, None) or container.testzip()
        # torch's reader ignores the case of "data.pkl", and names may occur twice.
        pickles = [entry for entry in entries if entry.filename.lower().endswith("data.pkl")]
        plain = [container.read(entry) for entry in pickles] if damaged is None else []
        listed = [(entry.filename, entry.file_size, entry.CRC) for entry in entries]
    if damaged is not None:
        raise ValueError(
            f"{where} to be intact, got a file with damaged bytes in {shown(damaged)}. Load an "
            "older checkpoint."
        )
    for record in plain:
        _C.check_pickle(record, where)
    with _reading(file, where):
        file.seek(0)
        contents = torch.load(file, map_location="cpu", weights_only=True)
    return contents, hashlib.sha256(repr(listed).encode()).hexdigest()


@contextmanager
def _reading(file: BinaryIO, where: str) -> Iterator[None]:
    """Converts errors from zipfile and torch to ValueError (damaged) or OSError (unreadable)."""
    try:
        yield
    except Exception as error:  # a damaged file may raise any type
        # Seeking to an offset from a damaged file raises OSError with EINVAL or without errno.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise _unreadable(file.name, error) from error
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise
        raise ValueError(
            f"{where} to be a whole file of save_checkpoint, got a file that is truncated, "
            f"damaged or of another format: {str(error).partition(chr(10))[0][:100]}. Load an "
            "older checkpoint. Read other formats with torch.load() or load_weights()."
        ) from error


def _checked_contents(contents: Any, where: str) -> dict[str, Any]:
    """Returns the contents after checking that save_checkpoint wrote the file."""
    if not isinstance(contents, dict) or not isinstance(contents.get("torchfuse"), dict):
        got = (
            shown(sorted(map(str, contents)))
            if isinstance(contents, dict)
            else type(contents).__name__
        )
        raise ValueError(
            f"{where} to be a file of save_checkpoint, got a file that contains {got}. Read other "
            "files with torch.load() and pass the state dicts to load_state_dict()."
        )
    version = contents["torchfuse"].get("format")
    if type(version) is not int or version != FORMAT:
        raise ValueError(
            f"{where} to be of format {FORMAT}, got {shown(version)}. "
            "Read it with the version that wrote it."
        )
    if not isinstance(contents.get("values"), dict):
        got = type(contents.get("values")).__name__
        raise ValueError(f"{where} to hold a dict as 'values', got {got}.")
    return contents
