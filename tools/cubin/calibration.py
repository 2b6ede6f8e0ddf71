# SPDX-License-Identifier: BSD-3-Clause
"""Sees that what we read from cubins is true, on kernels that are known in advance.

Two witnesses: what the source of calibration.cu demands, and what ptxas itself reports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cubin.build import Compiled, Compiler, Source
from cubin.elf import Kernel
from cubin.errors import CannotCheckError
from cubin.rules import count, demanded_blocks

SOURCE = Path(__file__).with_name("calibration.cu")

_REPORT = re.compile(
    r"Function properties for (\w+)\s+(\d+) bytes stack frame, .*\s.*: Used (\d+) registers"
    r"(?:.*?(\d+) bytes smem)?"
)


@dataclass(frozen=True)
class _Fact:
    """What must be found in a kernel: `least` to `most`."""

    kernel: str
    what: str
    read: Callable[[Kernel], int]
    least: int
    most: int


def _exactly(kernel: str, what: str, read: Callable[[Kernel], int], value: int) -> _Fact:
    return _Fact(kernel, what, read, value, value)


def _at_least(kernel: str, what: str, read: Callable[[Kernel], int], value: int) -> _Fact:
    return _Fact(kernel, what, read, value, 10**6)


def _number_of(operation: str, bits: int | None = None) -> Callable[[Kernel], int]:
    return lambda kernel: count(kernel, operation, bits)


def _copies(bits: int) -> list[_Fact]:
    """A kernel of one load and one store of this width, and no other access."""
    kernel = f"access_{bits}"
    return [
        *(_exactly(kernel, f"{o} of {bits} bits", _number_of(o, bits), 1) for o in ("LDG", "STG")),
        *(_exactly(kernel, o, _number_of(o), 1) for o in ("LDG", "STG")),
        *(_exactly(kernel, o, _number_of(o), 0) for o in ("LDL", "STL")),
    ]


_FACTS = (
    *(fact for bits in (128, 64, 32, 16) for fact in _copies(bits)),
    _at_least("local_array", "LDL", _number_of("LDL"), 1),
    _at_least("local_array", "STL", _number_of("STL"), 1),
    _at_least("local_array", "bytes of stack", lambda k: k.stack_bytes, 256),
    _at_least("spills", "LDL", _number_of("LDL"), 1),
    _at_least("spills", "STL", _number_of("STL"), 1),
    _exactly("spills", "registers left by the launch bounds", lambda k: k.register_cap, 40),
    _exactly("spills", "threads", lambda k: k.threads, 768),
    _exactly("static_shared", "bytes of shared memory", lambda k: k.shared_bytes, 1028),
    _exactly("static_shared", "threads", lambda k: k.threads, 256),
    _exactly("static_shared", "blocks per multiprocessor", demanded_blocks, 3),
    _exactly("access_32", "bytes of shared memory", lambda k: k.shared_bytes, 0),
    _exactly("access_32", "bytes of arguments", lambda k: k.argument_bytes, 16),
    _exactly("arguments", "bytes of arguments", lambda k: k.argument_bytes, 32008),
)


def differences(arch: int, compiled: Compiled) -> list[str]:
    """Where the compiled calibration.cu is not what is known of it, each as a sentence."""
    kernels = {kernel.symbol: kernel for kernel in compiled.kernels}
    found = [
        f"sm_{arch} {fact.kernel}: expected {fact.least} to {fact.most} {fact.what}, got {got}."
        for fact in _FACTS
        if fact.least > (got := _read(fact, kernels)) or got > fact.most
    ]
    reports = {match.group(1): match.groups()[1:] for match in _REPORT.finditer(compiled.log)}
    for name, kernel in kernels.items():
        read = (kernel.stack_bytes, kernel.registers, kernel.shared_bytes)
        reported = tuple(int(number or 0) for number in reports.get(name, ()))
        if read != reported:
            found.append(
                f"sm_{arch} {name}: expected stack, registers and shared memory as ptxas reports "
                f"them, {reported}, got {read}."
            )
    return found


def _read(fact: _Fact, kernels: dict[str, Kernel]) -> int:
    kernel = kernels.get(fact.kernel)
    return -1 if kernel is None else fact.read(kernel)


def calibrate(compiler: Compiler, nvcc: str, architectures: Sequence[int]) -> None:
    """Compiles the known kernels for every architecture and checks them.

    Raises:
        CannotCheckError: they are not what they must be.
    """
    command = (nvcc, "-std=c++20", "-O3", "--resource-usage", str(SOURCE))
    source = Source("calibration", command, SOURCE.parent, frozenset())
    compiled = compiler.compile([source], architectures)
    found = [line for (_, arch), one in compiled.items() for line in differences(arch, one)]
    if found:
        raise CannotCheckError(
            "the encoding of cubins is not the one that tools/cubin knows (a new nvcc?):\n  "
            + "\n  ".join(found)
        )
