# SPDX-License-Identifier: BSD-3-Clause
"""What holds for every kernel, and budget.json: the figures that a person has looked at.

The file has one line per kernel; lists have one number per architecture. Where a kernel has an
aligned and a misaligned form, the numbers of the latter follow. `half` stands for bf16 and fp16
alike. `vector_access` is edited by hand. It says by name which kernels must load or store 16 bytes
at a time, and whether these accesses "stream", that is, ask the caches to evict their lines first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cubin.cuobjdump import RESERVED_SHARED_BYTES, Figures, Kernel

MAX_ARGUMENT_BYTES = 32764
MAX_STATIC_SHARED_BYTES = 48 * 1024
MAX_TEXT_GROWTH = 1.25

_FORMS = (", aligned", ", misaligned")
# Threads and shared memory of a multiprocessor, from the CUDA programming guide. Architectures that
# are not listed are held to the smallest.
_SM_LIMITS = {80: (2048, 164 * 1024), 90: (2048, 228 * 1024), 100: (2048, 228 * 1024)}
_SMALLEST_SM = (1536, 100 * 1024)


@dataclass(frozen=True)
class Entry:
    """What one kernel may take, per architecture, and the vector accesses that it has on each."""

    registers: list[int]
    loads: int
    stores: int
    text: list[int]


@dataclass(frozen=True)
class Budget:
    """The contents of budget.json."""

    nvcc: str
    architectures: list[int]
    vector_access: dict[str, list[str]]
    kernels: dict[str, Entry]


def load(path: Path) -> Budget:
    """Reads a budget."""
    data = json.loads(path.read_text(encoding="utf-8"))
    count = len(data["architectures"])
    kernels = {}
    for folded, line in data.pop("kernels").items():
        forms = _FORMS if len(line["registers"]) == 2 * count else ("",)
        for index, form in enumerate(forms):
            own = {key: line[key][index * count :][:count] for key in ("registers", "text")}
            for dtype in ("bf16", "fp16"):
                name = re.sub(">$", f"{form}>", re.sub(r"\bhalf\b", dtype, folded))
                kernels[name] = Entry(**line | own)
    return Budget(**data, kernels=kernels)


def _folded(kernels: Mapping[str, Entry]) -> dict[str, Entry]:
    """The fewest lines that are about these kernels."""
    lines = dict(kernels)
    for name, one in kernels.items():
        other = lines.get(twin := name.replace(*_FORMS))
        if twin != name and other and (one.loads, one.stores) == (other.loads, other.stores):
            registers, text = one.registers + other.registers, one.text + other.text
            lines[name.replace(_FORMS[0], "")] = Entry(registers, one.loads, one.stores, text)
            del lines[name], lines[twin]
    for name, line in [*lines.items()]:
        if "bf16" in name and lines.get(twin := name.replace("bf16", "fp16")) == line:
            lines[name.replace("bf16", "half")] = line
            del lines[name], lines[twin]
    return lines


def dump(budget: Budget) -> str:
    """The text of budget.json."""
    access = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(kinds)}"
        for name, kinds in sorted(budget.vector_access.items())
    )
    kernels = []
    for name, entry in sorted(_folded(budget.kernels).items()):
        registers = ", ".join(f"{number:3}" for number in entry.registers)
        text = ", ".join(f"{number:5}" for number in entry.text)
        kernels.append(
            f'    {json.dumps(name) + ":":<54}{{"loads": {entry.loads:2}, "stores": '
            f'{entry.stores:2}, "registers": [{registers}], "text": [{text}]}}'
        )
    return (
        f'{{\n  "nvcc": {json.dumps(budget.nvcc)},\n'
        f'  "architectures": {json.dumps(budget.architectures)},\n'
        f'  "vector_access": {{\n{access}\n  }},\n'
        f'  "kernels": {{\n{",".join(f"{chr(10)}{line}" for line in kernels)[1:]}\n  }}\n}}\n'
    )


def record(figures: Figures, nvcc: str, vector_access: dict[str, list[str]]) -> Budget:
    """The budget that a library just meets."""
    kernels = {
        name: Entry(
            registers=[granted(by_arch[arch].registers) for arch in sorted(by_arch)],
            loads=min(kernel.count("LDG", "128") for kernel in by_arch.values()),
            stores=min(kernel.count("STG", "128") for kernel in by_arch.values()),
            text=[by_arch[arch].text_bytes for arch in sorted(by_arch)],
        )
        for name, by_arch in figures.items()
    }
    return Budget(nvcc, sorted(next(iter(figures.values()))), vector_access, kernels)


# --- Rules; each violation is a sentence ----------------------------------------------------------


def granted(registers: int) -> int:
    """Registers are handed out in eights: what a thread really takes."""
    return (registers + 7) // 8 * 8


def _blocks_by_registers(registers: int, threads: int) -> int:
    """How many blocks the 65,536 registers of a multiprocessor are enough for."""
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
    # By the launch bounds, of which the compiler wrote down the registers that they leave.
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


def _check_accesses(kernel: Kernel, kinds: Sequence[str], entry: Entry | None) -> Iterator[str]:
    """Vector paths have vector accesses with their cache hint, whatever was recorded."""
    recorded = (entry.loads, entry.stores) if entry else (0, 0)
    for kind, operation, least in zip(("load", "store"), ("LDG", "STG"), recorded, strict=True):
        found, hinted = kernel.count(operation, "128"), kernel.count(operation, "128", "EF")
        if kind in kinds and not found:
            yield f"{kind}s of 128 bits, got none."
        if found < least:
            yield f"{least} {kind}s of 128 bits, got {found}."
        if hinted != (hints := found if "stream" in kinds else 0):
            yield f"{hints} of {found} {kind}s of 128 bits to evict first (EF), got {hinted}."


def _check_entry(kernel: Kernel, registers: int, text: int) -> Iterator[str]:
    if kernel.registers > registers:
        yield f"at most {registers} registers, got {kernel.registers}."
    if (got := kernel.text_bytes) > MAX_TEXT_GROWTH * text:
        yield f"some {text} bytes of code, got {got} ({100 * got / text - 100:.0f} % more)."


def violations(figures: Figures, budget: Budget) -> Iterator[str]:
    """Finds what breaks a rule or departs from the budget."""
    access = budget.vector_access
    families = {name.partition("<")[0] for name in figures}
    for name in sorted(access.keys() ^ families):
        yield f"{name}: expected in vector_access and in the library, got it in one of them."
    for name in sorted(budget.kernels.keys() ^ figures.keys()):
        yield f"{name}: expected in the budget and in the library, got it in one of them."
    for name, by_arch in figures.items():
        entry = budget.kernels.get(name)
        kinds = access.get(name.partition("<")[0], ())
        for arch, kernel in by_arch.items():
            found = [*_check_limits(arch, kernel), *_check_accesses(kernel, kinds, entry)]
            if entry is not None:
                index = budget.architectures.index(arch)
                found += _check_entry(kernel, entry.registers[index], entry.text[index])
            yield from (f"{name} sm_{arch}: expected {sentence}" for sentence in found)
