# SPDX-License-Identifier: BSD-3-Clause
"""Counts memory instructions in machine code.

Since sm_70 an instruction is 128 bits. NVIDIA documents neither the opcodes nor the fields; the
values below were read off known kernels, and calibration.py compiles such kernels anew to see that
they still hold.
"""

from __future__ import annotations

import struct
from collections import Counter

INSTRUCTION_BYTES = 16

# Bits 0-8 are the operation; bits 9-11 tell where its operands come from.
OPERATION_MASK = 0x1FF
OPERATIONS = {0x181: "LDG", 0x183: "LDL", 0x186: "STG", 0x187: "STL"}

# Bits 73-75: signed and unsigned bytes and halves, then words of 32, 64 and 128 bits.
WIDTH_SHIFT = 73 - 64
WIDTHS = (8, 8, 16, 16, 32, 64, 128, 0)

Accesses = Counter[tuple[str, int]]
"""How often each operation of each width in bits occurs, as in {("LDG", 128): 4}."""


def count_accesses(text: bytes) -> Accesses:
    """Counts the loads and stores of global (LDG, STG) and local memory (LDL, STL)."""
    accesses: Accesses = Counter()
    for low, high in struct.iter_unpack("<QQ", text):
        operation = OPERATIONS.get(low & OPERATION_MASK)
        if operation is not None:
            accesses[operation, WIDTHS[high >> WIDTH_SHIFT & 7]] += 1
    return accesses
