# SPDX-License-Identifier: BSD-3-Clause
"""The machine code of CUDA kernels, as NVIDIA's cuobjdump reads it, and what it must be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


class CannotCheckError(Exception):
    """Something that the check needs is missing or not understood: no verdict on the kernels."""


@dataclass(frozen=True)
class Kernel:
    """What a library says about one kernel on one architecture."""

    symbol: str
    arch: int
    registers: int
    register_cap: int  # what launch bounds leave per thread; 255 without a bound
    threads: int  # per block, at most
    stack_bytes: int
    argument_bytes: int
    shared_bytes: int
    opcodes: Counter[str]  # how often each instruction occurs, as in {"LDG.E.EF.128": 4}

    @property
    def text_bytes(self) -> int:
        """The size of the code: an instruction has 16 bytes since sm_70."""
        return 16 * self.opcodes.total()

    def count(self, operation: str, *modifiers: str) -> int:
        """How many instructions of an operation have all these modifiers."""
        return sum(
            number
            for opcode, number in self.opcodes.items()
            if (words := opcode.split("."))[0] == operation and {*modifiers} <= {*words}
        )


def granted(registers: int) -> int:
    """Registers are handed out in eights: what a thread really takes."""
    return (registers + 7) // 8 * 8
