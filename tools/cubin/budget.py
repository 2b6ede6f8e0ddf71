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

from cubin import CannotCheckError, Kernel, granted
from cubin.cuobjdump import RESERVED_SHARED_BYTES

MAX_ARGUMENT_BYTES = 32764
MAX_STATIC_SHARED_BYTES = 48 * 1024
MAX_TEXT_GROWTH = 1.25

_FORMS = (", aligned", ", misaligned")
_WARP = 32
_REGISTERS_PER_SM = 65536
# Threads and shared memory of a multiprocessor, from the CUDA programming guide. Architectures that
# are not listed are held to the smallest.
_SM_LIMITS = {80: (2048, 164 * 1024), 90: (2048, 228 * 1024), 100: (2048, 228 * 1024)}
_SMALLEST_SM = (1536, 100 * 1024)

Figures = Mapping[str, Mapping[int, Kernel]]
"""What a library has, by short name and architecture."""


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
    """Reads a budget.

    Raises:
        CannotCheckError: it is missing or not in the form that dump() writes.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        count = len(data["architectures"])
        lines = [(name, Entry(**line)) for name, line in data.pop("kernels").items()]
        kernels = {name: own for line in lines for name, own in _unfolded(*line, count)}
        return Budget(**data, kernels=kernels)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotCheckError(
            f"expected a budget in {path}, got {type(error).__name__}: {error}. Correct it."
        ) from error


def _unfolded(name: str, line: Entry, count: int) -> Iterator[tuple[str, Entry]]:
    """The kernels that a line is about, each with `count` architectures."""
    forms = _FORMS if len(line.registers) == 2 * count else ("",)
    if not len(line.registers) == len(line.text) == len(forms) * count:
        raise ValueError(f"{name} needs {count} numbers in each list, or twice as many")
    for form, begin in zip(forms, (0, count), strict=False):
        registers, text = (numbers[begin:][:count] for numbers in (line.registers, line.text))
        for dtype in ("bf16", "fp16"):
            kernel = re.sub(">$", f"{form}>", re.sub(r"\bhalf\b", dtype, name))
            yield kernel, Entry(registers, line.loads, line.stores, text)


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
    kernels = ",\n".join(
        f"    {json.dumps(name) + ':':<54}{_line(entry)}"
        for name, entry in sorted(_folded(budget.kernels).items())
    )
    return (
        f'{{\n  "nvcc": {json.dumps(budget.nvcc)},\n'
        f'  "architectures": {json.dumps(budget.architectures)},\n'
        f'  "vector_access": {{\n{access}\n  }},\n  "kernels": {{\n{kernels}\n  }}\n}}\n'
    )


def _line(entry: Entry) -> str:
    registers = ", ".join(f"{number:3}" for number in entry.registers)
    text = ", ".join(f"{number:5}" for number in entry.text)
    counts = f'"loads": {entry.loads:2}, "stores": {entry.stores:2}'
    return f'{{{counts}, "registers": [{registers}], "text": [{text}]}}'


def record(figures: Figures, nvcc: str, vector_access: dict[str, list[str]]) -> Budget:
    """The budget that a library just meets. Every kernel must have every architecture."""
    architectures = sorted({arch for by_arch in figures.values() for arch in by_arch})
    kernels = {}
    for name, by_arch in figures.items():
        found = [by_arch[arch] for arch in architectures]
        kernels[name] = Entry(
            registers=[granted(kernel.registers) for kernel in found],
            loads=min(kernel.count("LDG", "128") for kernel in found),
            stores=min(kernel.count("STG", "128") for kernel in found),
            text=[kernel.text_bytes for kernel in found],
        )
    return Budget(nvcc, architectures, vector_access, kernels)


# --- Rules; each violation is a sentence ----------------------------------------------------------


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


def _check_entry(kernel: Kernel, entry: Entry, index: int) -> Iterator[str]:
    registers, text = entry.registers[index], entry.text[index]
    if kernel.registers > registers:
        yield f"at most {registers} registers, got {kernel.registers}."
    if (got := kernel.text_bytes) > MAX_TEXT_GROWTH * text:
        yield f"some {text} bytes of code, got {got} ({100 * got / text - 100:.0f} % more)."


def violations(figures: Figures, budget: Budget) -> Iterator[str]:
    """Finds what breaks a rule or departs from the budget."""
    access = budget.vector_access
    families = {name.partition("<")[0] for name in figures}
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
        kinds = access.get(name.partition("<")[0], ())
        for arch, kernel in by_arch.items():
            found = [*_check_limits(kernel), *_check_accesses(kernel, kinds, entry)]
            if entry is not None:
                found += _check_entry(kernel, entry, budget.architectures.index(arch))
            yield from (f"{name} sm_{arch}: expected {sentence}" for sentence in found)
