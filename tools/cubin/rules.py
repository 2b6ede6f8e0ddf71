# SPDX-License-Identifier: BSD-3-Clause
"""What holds for every kernel, whatever its budget says."""

from __future__ import annotations

from cubin.elf import RESERVED_SHARED_BYTES, Kernel

MAX_ARGUMENT_BYTES = 32764
MAX_STATIC_SHARED_BYTES = 48 * 1024
VECTOR_BITS = 128

_WARP = 32
_REGISTERS_PER_SM = 65536
# Threads and shared memory of a multiprocessor, from the CUDA programming guide. Architectures that
# are not listed are held to the smallest.
_SM_LIMITS = {80: (2048, 164 * 1024), 90: (2048, 228 * 1024), 100: (2048, 228 * 1024)}
_SMALLEST_SM = (1536, 100 * 1024)


def granted(registers: int) -> int:
    """Registers are handed out in eights: what a thread really takes."""
    return (registers + 7) // 8 * 8


def _blocks_by_registers(registers: int, threads: int) -> int:
    warps = (threads + _WARP - 1) // _WARP
    return _REGISTERS_PER_SM // (granted(registers) * _WARP * warps)


def demanded_blocks(kernel: Kernel) -> int:
    """Blocks per multiprocessor that the launch bounds ask for, at least 1."""
    return max(1, _blocks_by_registers(kernel.register_cap, kernel.threads))


def resident_blocks(kernel: Kernel) -> int:
    """Blocks per multiprocessor that registers, shared memory and threads allow."""
    threads, shared = _SM_LIMITS.get(kernel.arch, _SMALLEST_SM)
    return min(
        _blocks_by_registers(kernel.registers, kernel.threads),
        shared // (kernel.shared_bytes + RESERVED_SHARED_BYTES),
        threads // kernel.threads,
    )


def count(kernel: Kernel, operation: str, bits: int | None = None) -> int:
    """How many instructions of an operation there are, of one width or of all."""
    return sum(
        number
        for (name, width), number in kernel.accesses.items()
        if name == operation and bits in (None, width)
    )


def check_kernel(name: str, kernel: Kernel) -> list[str]:
    """Violations of the rules that need no budget, each as a sentence."""
    what = f"{name} sm_{kernel.arch}"
    loads, stores = count(kernel, "LDL"), count(kernel, "STL")
    violations = []
    if loads or stores:
        violations.append(
            f"{what}: expected no local memory, got {loads} loads and {stores} stores of it. "
            "Lower its register pressure, or the blocks that its launch bounds ask for."
        )
    if kernel.stack_bytes != 0:
        violations.append(
            f"{what}: expected no stack, got {kernel.stack_bytes} bytes. Spilled registers and "
            "arrays indexed at run time live there."
        )
    demanded, resident = demanded_blocks(kernel), resident_blocks(kernel)
    if resident < demanded:
        violations.append(
            f"{what}: expected {demanded} blocks of {kernel.threads} threads per multiprocessor, "
            f"got {resident}, by {kernel.registers} registers and {kernel.shared_bytes} bytes of "
            "shared memory. State launch bounds that fit."
        )
    if kernel.argument_bytes > MAX_ARGUMENT_BYTES:
        violations.append(
            f"{what}: expected at most {MAX_ARGUMENT_BYTES} bytes of arguments, got "
            f"{kernel.argument_bytes}. Let its table hold fewer rows."
        )
    if kernel.shared_bytes > MAX_STATIC_SHARED_BYTES:
        violations.append(
            f"{what}: expected at most {MAX_STATIC_SHARED_BYTES} bytes of static shared memory, "
            f"got {kernel.shared_bytes}."
        )
    return violations
