# SPDX-License-Identifier: BSD-3-Clause
"""Rules for every kernel, and budget.json, the reviewed figures.

The file has one line for all forms of a kernel, which differ in dtypes and alignment only. For each
architecture, `registers` and `text` (bytes of code) are the maximum over all forms. `loads` and
`stores` count 128-bit accesses in all forms together.

`vector_access` is edited by hand. An entry says whether a kernel must load or store 16 bytes at a
time, and whether the accesses "stream", with the hint to evict the cache lines first. "aligned"
exempts the instances for rows that are not aligned, whose last template argument is false.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cubin.cuobjdump import DTYPES, RESERVED_SHARED_BYTES, Figures, Kernel

MAX_ARGUMENT_BYTES = 32764
MAX_STATIC_SHARED_BYTES = 48 * 1024
MAX_TEXT_GROWTH = 1.25

_FORMS = {*DTYPES.values(), "aligned", "misaligned"}
_ACCESSES = {"load": "LDG", "store": "STG"}
# Threads and shared memory per multiprocessor, from the CUDA programming guide. Other architectures
# use the smallest limits.
_SM_LIMITS = {80: (2048, 164 * 1024), 90: (2048, 228 * 1024), 100: (2048, 228 * 1024)}
_SMALLEST_SM = (1536, 100 * 1024)


@dataclass(frozen=True)
class Entry:
    """Limits for a kernel's forms, and the required vector accesses."""

    forms: int
    loads: int
    stores: int
    registers: list[int]
    text: list[int]


@dataclass(frozen=True)
class Budget:
    """The contents of budget.json."""

    nvcc: str
    architectures: list[int]
    vector_access: dict[str, list[str]]
    kernels: dict[str, Entry]


def load(path: Path) -> Budget:
    """Reads budget.json."""
    data = json.loads(path.read_text(encoding="utf-8"))
    kernels = {name: Entry(**line) for name, line in data.pop("kernels").items()}
    return Budget(**data, kernels=kernels)


def dump(budget: Budget) -> str:
    """Returns the text of budget.json."""
    lines = {name: vars(entry) for name, entry in budget.kernels.items()}
    return (
        f'{{\n  "nvcc": {json.dumps(budget.nvcc)},\n'
        f'  "architectures": {json.dumps(budget.architectures)},\n'
        f'  "vector_access": {_table(budget.vector_access)},\n'
        f'  "kernels": {_table(lines)}\n}}\n'
    )


def _table(rows: Mapping[str, object]) -> str:
    lines = [
        f"{json.dumps(name) + ':':<41} {json.dumps(row)}" for name, row in sorted(rows.items())
    ]
    return "{\n    " + ",\n    ".join(lines) + "\n  }"


def record(figures: Figures, nvcc: str, vector_access: dict[str, list[str]]) -> Budget:
    """Returns a budget with a library's current figures."""
    architectures = sorted(next(iter(figures.values())))
    kernels = {
        name: Entry(
            forms=len(forms),
            loads=_vector_accesses(forms, "load"),
            stores=_vector_accesses(forms, "store"),
            registers=[
                max(granted(form[arch].registers) for form in forms) for arch in architectures
            ],
            text=[max(form[arch].text_bytes for form in forms) for arch in architectures],
        )
        for name, forms in _by_line(figures).items()
    }
    return Budget(nvcc, architectures, vector_access, kernels)


def _line(name: str) -> str:
    """Returns a kernel's name without dtypes and alignment, which names the budget line."""
    kernel, _, arguments = name.removesuffix(">").partition("<")
    others = [word for word in arguments.split(", ") if word and word not in _FORMS]
    return f"{kernel}<{', '.join(others)}>" if others else kernel


def _by_line(figures: Figures) -> dict[str, list[dict[int, Kernel]]]:
    lines = defaultdict(list)
    for name, by_arch in figures.items():
        lines[_line(name)].append(by_arch)
    return lines


def _vector_accesses(forms: Sequence[dict[int, Kernel]], kind: str) -> int:
    """Returns the number of 128-bit accesses in all forms, minimum over architectures."""
    operation = _ACCESSES[kind]
    return min(sum(form[arch].count(operation, "128") for form in forms) for arch in forms[0])


# --- Rules; each violation is a message -----------------------------------------------------------


def granted(registers: int) -> int:
    """Returns the registers that a thread occupies: registers are allocated in units of eight."""
    return (registers + 7) // 8 * 8


def _blocks_by_registers(registers: int, threads: int) -> int:
    """Returns how many blocks fit in a multiprocessor's 65,536 registers."""
    return 65536 // (granted(registers) * 32 * ((threads + 31) // 32))


def _check_limits(arch: int, kernel: Kernel) -> Iterator[str]:
    loads, stores, shared = kernel.count("LDL"), kernel.count("STL"), kernel.shared_bytes
    if loads or stores:
        yield f"no local memory, got {loads} loads and {stores} stores: lower its registers."
    if kernel.stack_bytes:
        yield f"no stack, got {kernel.stack_bytes} bytes. Spills and indexed arrays live there."
    most_threads, most_shared = _SM_LIMITS.get(arch, _SMALLEST_SM)
    resident = min(
        _blocks_by_registers(kernel.registers, kernel.threads),
        most_shared // (shared + RESERVED_SHARED_BYTES),
        most_threads // kernel.threads,
    )
    # The compiler records the register limit that follows from the launch bounds.
    demanded = max(1, _blocks_by_registers(kernel.register_cap, kernel.threads))
    if resident < demanded:
        yield (
            f"{demanded} blocks of {kernel.threads} threads per multiprocessor, got {resident}, by "
            f"{kernel.registers} registers and {shared} bytes of shared memory."
        )
    if (got := kernel.argument_bytes) > MAX_ARGUMENT_BYTES:
        yield f"at most {MAX_ARGUMENT_BYTES} bytes of arguments, got {got}."
    if shared > MAX_STATIC_SHARED_BYTES:
        yield f"at most {MAX_STATIC_SHARED_BYTES} bytes of static shared memory, got {shared}."


def _check_accesses(kernel: Kernel, kinds: Sequence[str]) -> Iterator[str]:
    """Checks that vector kernels have vector accesses with the right cache hint."""
    for kind, operation in _ACCESSES.items():
        found, hinted = kernel.count(operation, "128"), kernel.count(operation, "128", "EF")
        if kind in kinds and not found:
            yield f"{kind}s of 128 bits, got none."
        if hinted != (hints := found if "stream" in kinds else 0):
            yield f"{hints} of {found} {kind}s of 128 bits to evict first (EF), got {hinted}."


def _check_entry(kernel: Kernel, registers: int, text: int) -> Iterator[str]:
    if kernel.registers > registers:
        yield f"at most {registers} registers, got {kernel.registers}."
    if (got := kernel.text_bytes) > MAX_TEXT_GROWTH * text:
        yield f"some {text} bytes of code, got {got} ({100 * got / text - 100:.0f} % more)."


def _check_forms(forms: Sequence[dict[int, Kernel]], entry: Entry | None) -> Iterator[str]:
    """Checks the number of forms, and the vector accesses in all forms together."""
    if len(forms) != (recorded := entry.forms if entry else 0):
        yield f"{recorded} forms of dtype and alignment, got {len(forms)}."
    elif entry is not None:
        for kind, least in (("load", entry.loads), ("store", entry.stores)):
            if (found := _vector_accesses(forms, kind)) < least:
                yield f"{least} {kind}s of 128 bits in all forms together, got {found}."


def violations(figures: Figures, budget: Budget) -> Iterator[str]:
    """Yields a message for each broken rule and each deviation from the budget."""
    access, lines = budget.vector_access, _by_line(figures)
    families = {name.partition("<")[0] for name in figures}
    for name in sorted(access.keys() ^ families):
        yield f"{name}: expected in vector_access and in the library, got it in one of them."
    for name in sorted(budget.kernels.keys() | lines.keys()):
        for sentence in _check_forms(lines.get(name, []), budget.kernels.get(name)):
            yield f"{name}: expected {sentence}"
    for name, by_arch in figures.items():
        entry = budget.kernels.get(_line(name))
        kinds: Sequence[str] = access.get(name.partition("<")[0], ())
        if "aligned" in kinds and name.endswith(", false>"):
            kinds = ()
        for arch, kernel in by_arch.items():
            found = [*_check_limits(arch, kernel), *_check_accesses(kernel, kinds)]
            if entry is not None:
                index = budget.architectures.index(arch)
                found += _check_entry(kernel, entry.registers[index], entry.text[index])
            yield from (f"{name} sm_{arch}: expected {sentence}" for sentence in found)
