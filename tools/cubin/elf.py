# SPDX-License-Identifier: BSD-3-Clause
"""Reads the kernels of a cubin: an ELF file whose sections are named after the kernels.

.text.<kernel>       machine code
.nv.shared.<kernel>  its size is the static shared memory
.nv.info             attributes with a symbol: registers, stack frame
.nv.info.<kernel>    attributes of one kernel: argument bytes, launch bounds
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cubin.errors import CannotCheckError
from cubin.sass import INSTRUCTION_BYTES, Accesses, count_accesses

_MACHINE_CUDA = 190
_NOBITS = 8
_FUNCTION = 2
_ENTRY = 0x10  # in a symbol's st_other: a kernel, not a function called by one

# Codes of attributes in .nv.info, as read off known kernels (see calibration.py).
ATTRIBUTES = {
    "max_threads": 0x05,
    "frame_size": 0x11,
    "min_stack_size": 0x12,
    "argument_bytes": 0x19,
    "register_cap": 0x1B,
    "registers": 0x2F,
}
_WITH_PAYLOAD = 0x04

# Where the system takes a part of each block's shared memory, there is a section that says so.
_RESERVED_SECTION = ".nv.shared.reserved.0"
RESERVED_SHARED_BYTES = 1024

_NO_LAUNCH_BOUNDS = 1024  # threads


@dataclass(frozen=True)
class Kernel:
    """What a cubin says about one kernel."""

    symbol: str
    arch: int
    registers: int
    register_cap: int  # what launch bounds leave per thread; 255 without a bound
    threads: int  # per block, at most
    stack_bytes: int
    argument_bytes: int
    shared_bytes: int
    text_bytes: int
    accesses: Accesses


@dataclass(frozen=True)
class _Section:
    size: int
    data: bytes


@dataclass(frozen=True)
class _Symbol:
    name: str
    is_kernel: bool
    section: int


class _Elf:
    """Sections and symbols of a 64-bit little-endian ELF file."""

    def __init__(self, image: bytes) -> None:
        if image[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", image, 18)[0] != (
            _MACHINE_CUDA
        ):
            raise CannotCheckError("expected a 64-bit CUDA ELF file, got something else.")
        flags = struct.unpack_from("<I", image, 48)[0]
        # Version 8 of the ABI moved the architecture within the flags.
        self.arch = flags >> 8 & 0xFF if image[8] >= 8 else flags & 0xFF
        self.by_name = _read_sections(image)
        self.symbols = self._read_symbols()

    def data(self, name: str) -> bytes:
        section = self.by_name.get(name)
        return b"" if section is None else section.data

    def _read_symbols(self) -> list[_Symbol]:
        names = self.data(".strtab")
        symbols = []
        for name, info, other, section, _, _ in struct.iter_unpack("<IBBHQQ", self.data(".symtab")):
            is_kernel = info & 0xF == _FUNCTION and bool(other & _ENTRY)
            symbols.append(_Symbol(_string(names, name), is_kernel, section))
        return symbols


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _read_sections(image: bytes) -> dict[str, _Section]:
    begin = struct.unpack_from("<Q", image, 40)[0]
    size, count, names_index = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, begin + i * size) for i in range(count)]
    names_at, names_size = headers[names_index][4:6]
    names = image[names_at : names_at + names_size]
    sections = {}
    for at, kind, _, _, offset, length, *_ in headers:
        data = b"" if kind == _NOBITS else image[offset : offset + length]
        sections[_string(names, at)] = _Section(length, data)
    return sections


def _attributes(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields code, short value and payload; an attribute has either of the two."""
    offset = 0
    while offset < len(info):
        layout, code, value = struct.unpack_from("<BBH", info, offset)
        offset += 4
        payload = b""
        if layout == _WITH_PAYLOAD:
            payload = info[offset : offset + value]
            offset += value
        yield code, value, payload


def _by_symbol(elf: _Elf, attribute: str) -> dict[int, int]:
    """Values of an attribute of .nv.info by index of the symbol."""
    return dict(
        struct.unpack("<II", payload)
        for code, _, payload in _attributes(elf.data(".nv.info"))
        if code == ATTRIBUTES[attribute]
    )


def _own(elf: _Elf, symbol: str, attribute: str) -> int | None:
    """Value of an attribute of .nv.info.<kernel>: the number, or the product of the numbers."""
    for code, value, payload in _attributes(elf.data(f".nv.info.{symbol}")):
        if code == ATTRIBUTES[attribute]:
            product = 1
            for (number,) in struct.iter_unpack("<I", payload):
                product *= number
            return product if payload else value
    return None


def _shared_bytes(elf: _Elf, symbol: str) -> int:
    section = elf.by_name.get(f".nv.shared.{symbol}")
    if section is None:
        return 0
    return section.size - (RESERVED_SHARED_BYTES if _RESERVED_SECTION in elf.by_name else 0)


def _read_kernel(elf: _Elf, index: int, stack_bytes: int, registers: dict[int, int]) -> Kernel:
    symbol = elf.symbols[index].name
    text = elf.data(f".text.{symbol}")
    register_cap = _own(elf, symbol, "register_cap")
    if len(text) % INSTRUCTION_BYTES != 0 or index not in registers or register_cap is None:
        raise CannotCheckError(
            f"sm_{elf.arch} {symbol}: expected 16-byte instructions and, in .nv.info, numbers of "
            "registers; got something else."
        )
    return Kernel(
        symbol=symbol,
        arch=elf.arch,
        registers=registers[index],
        register_cap=register_cap,
        threads=_own(elf, symbol, "max_threads") or _NO_LAUNCH_BOUNDS,
        stack_bytes=stack_bytes,
        argument_bytes=_own(elf, symbol, "argument_bytes") or 0,
        shared_bytes=_shared_bytes(elf, symbol),
        text_bytes=len(text),
        accesses=count_accesses(text),
    )


def _read_all(image: bytes) -> list[Kernel]:
    elf = _Elf(image)
    registers = _by_symbol(elf, "registers")
    stacks = [_by_symbol(elf, "frame_size"), _by_symbol(elf, "min_stack_size")]
    kernels = []
    for index, symbol in enumerate(elf.symbols):
        if symbol.is_kernel:
            # Functions that it calls, where they are not inlined, lie in its section.
            inside = [i for i, other in enumerate(elf.symbols) if other.section == symbol.section]
            stack_bytes = max(sizes.get(i, 0) for sizes in stacks for i in inside)
            kernels.append(_read_kernel(elf, index, stack_bytes, registers))
    found = {f".text.{kernel.symbol}" for kernel in kernels}
    for name in elf.by_name:
        if name.startswith(".text.") and name not in found:
            raise CannotCheckError(f"sm_{elf.arch}: expected a kernel in {name}, got none.")
    return kernels


def read_kernels(image: bytes) -> list[Kernel]:
    """Reads all kernels of a cubin.

    Raises:
        CannotCheckError: the file is not what we know, for one because a compiler changed it.
    """
    try:
        return _read_all(image)
    except (struct.error, ValueError, IndexError) as error:
        raise CannotCheckError(f"expected a cubin in the form we know, got: {error}.") from error
