# SPDX-License-Identifier: BSD-3-Clause
"""What holds for every kernel, and what departs from the budget, each as a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cubin import Kernel, family, granted
from cubin.budget import Budget, Entry, Figures
from cubin.cuobjdump import RESERVED_SHARED_BYTES

MAX_ARGUMENT_BYTES = 32764
MAX_STATIC_SHARED_BYTES = 48 * 1024
MAX_TEXT_GROWTH = 1.25

_WARP = 32
_REGISTERS_PER_SM = 65536
# Threads and shared memory of a multiprocessor, from the CUDA programming guide. Architectures that
# are not listed are held to the smallest.
_SM_LIMITS = {80: (2048, 164 * 1024), 90: (2048, 228 * 1024), 100: (2048, 228 * 1024)}
_SMALLEST_SM = (1536, 100 * 1024)


def _blocks_by_registers(registers: int, threads: int) -> int:
    warps = (threads + _WARP - 1) // _WARP
    return _REGISTERS_PER_SM // (granted(registers) * _WARP * warps)


def _check_limits(kernel: Kernel) -> Iterator[str]:
    loads, stores, shared = kernel.count("LDL"), kernel.count("STL"), kernel.shared_bytes
    if loads or stores:
        yield (
            f"no local memory, got {loads} loads and {stores} stores of it. Lower its register "
            "pressure, or the blocks that its launch bounds ask for."
        )
    if kernel.stack_bytes:
        yield f"no stack, got {kernel.stack_bytes} bytes. Spills and indexed arrays live there."
    most_threads, most_shared = _SM_LIMITS.get(kernel.arch, _SMALLEST_SM)
    resident = min(
        _blocks_by_registers(kernel.registers, kernel.threads),
        most_shared // (shared + RESERVED_SHARED_BYTES),
        most_threads // kernel.threads,
    )
    # By the launch bounds, of which the compiler wrote down the registers that they leave.
    demanded = max(1, _blocks_by_registers(kernel.register_cap, kernel.threads))
    if resident < demanded:
        yield (
            f"{demanded} blocks of {kernel.threads} threads per multiprocessor, got {resident}, by "
            f"{kernel.registers} registers and {shared} bytes of shared memory. State launch "
            "bounds that fit."
        )
    if (got := kernel.argument_bytes) > MAX_ARGUMENT_BYTES:
        yield (
            f"at most {MAX_ARGUMENT_BYTES} bytes of arguments, got {got}. Let its table hold fewer "
            "rows."
        )
    if shared > MAX_STATIC_SHARED_BYTES:
        yield f"at most {MAX_STATIC_SHARED_BYTES} bytes of static shared memory, got {shared}."


def _check_accesses(kernel: Kernel, kinds: Sequence[str]) -> Iterator[str]:
    """Vector paths have vector accesses with their cache hint, whatever was recorded."""
    for kind, operation in (("load", "LDG"), ("store", "STG")):
        found, hinted = kernel.count(operation, "128"), kernel.count(operation, "128", "EF")
        if kind in kinds and not found:
            yield f"{kind}s of 128 bits, got none."
        if hinted != (hints := found if "stream" in kinds else 0):
            yield f"{hints} of {found} {kind}s of 128 bits to evict first (EF), got {hinted}."


def _check_entry(kernel: Kernel, entry: Entry, index: int) -> Iterator[str]:
    registers, text = entry.registers[index], entry.text[index]
    if kernel.registers > registers:
        yield f"at most {registers} registers, got {kernel.registers}."
    if (got := kernel.text_bytes) > MAX_TEXT_GROWTH * text:
        yield f"some {text} bytes of code, got {got} ({100 * got / text - 100:.0f} % more)."
    for kind, operation, least in (("load", "LDG", entry.loads), ("store", "STG", entry.stores)):
        if (found := kernel.count(operation, "128")) < least:
            yield f"{least} {kind}s of 128 bits, got {found}."


def violations(figures: Figures, budget: Budget) -> Iterator[str]:
    """Finds what breaks a rule or departs from the budget."""
    access = budget.vector_access
    families = {family(name) for name in figures}
    for name in sorted(access.keys() - families):
        yield f"vector_access of {name}: expected a kernel of that name, got none."
    for name in sorted(families - access.keys()):
        yield (
            f'{name}: expected an entry in vector_access that says whether it has "load" and '
            '"store" of 128 bits and whether these "stream", got none.'
        )
    for name in sorted(budget.kernels.keys() - figures.keys()):
        yield f"{name}: expected in the library, got no such kernel."
    for name, by_arch in figures.items():
        entry = budget.kernels.get(name)
        if entry is None:
            yield f"{name}: expected in the budget, got no such entry."
        for arch, kernel in by_arch.items():
            found = [*_check_limits(kernel), *_check_accesses(kernel, access.get(family(name), ()))]
            if entry is not None and arch in budget.architectures:
                found += _check_entry(kernel, entry, budget.architectures.index(arch))
            yield from (f"{name} sm_{arch}: expected {sentence}" for sentence in found)
