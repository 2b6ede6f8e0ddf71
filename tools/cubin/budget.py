# SPDX-License-Identifier: BSD-3-Clause
"""The figures of every kernel that a person has looked at, and what departs from them.

budget.json has one line per kernel; lists have one number per architecture. `vector_access` says by
name which kernels must load or store 16 bytes at a time, and is edited by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cubin.elf import Kernel
from cubin.errors import CannotCheckError
from cubin.names import family
from cubin.rules import VECTOR_BITS, count, granted

Figures = Mapping[str, Mapping[int, Kernel]]
"""What was compiled, by short name and architecture."""

MAX_TEXT_GROWTH = 1.25
OPERATIONS = {"load": "LDG", "store": "STG"}


@dataclass(frozen=True)
class Entry:
    """What one kernel may take, per architecture, and the vector accesses that it has on each."""

    registers: tuple[int, ...]
    text_bytes: tuple[int, ...]
    vectors: Mapping[str, int]  # by "load" and "store"


@dataclass(frozen=True)
class Budget:
    """The contents of budget.json."""

    nvcc: str
    architectures: tuple[int, ...]
    vector_access: Mapping[str, tuple[str, ...]]
    kernels: Mapping[str, Entry]


def load(path: Path) -> Budget:
    """Reads a budget.

    Raises:
        CannotCheckError: it is missing or not in the form that dump() writes.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        architectures = tuple(map(int, data["architectures"]))
        kernels = {}
        for name, line in data["kernels"].items():
            vectors = {kind: int(line[f"{kind}s"]) for kind in OPERATIONS}
            entry = Entry(tuple(line["registers"]), tuple(line["text"]), vectors)
            if not len(entry.registers) == len(entry.text_bytes) == len(architectures):
                raise ValueError(f"{name} needs {len(architectures)} numbers in each list")
            kernels[name] = entry
        vector_access = {name: tuple(kinds) for name, kinds in data["vector_access"].items()}
        return Budget(str(data["nvcc"]), architectures, vector_access, kernels)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotCheckError(
            f"expected a budget in {path}, got {type(error).__name__}: {error}. Correct it "
            "or, where it is missing, write it with --update."
        ) from error


def dump(budget: Budget) -> str:
    """The text of budget.json."""
    kernels = ",\n".join(
        f"    {json.dumps(name) + ':':<60}{_line(entry)}"
        for name, entry in sorted(budget.kernels.items())
    )
    access = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(list(kinds))}"
        for name, kinds in sorted(budget.vector_access.items())
    )
    return (
        f'{{\n  "nvcc": {json.dumps(budget.nvcc)},\n'
        f'  "architectures": {json.dumps(list(budget.architectures))},\n'
        f'  "vector_access": {{\n{access}\n  }},\n  "kernels": {{\n{kernels}\n  }}\n}}\n'
    )


def _line(entry: Entry) -> str:
    registers = ", ".join(f"{number:3}" for number in entry.registers)
    text = ", ".join(f"{number:5}" for number in entry.text_bytes)
    vectors = ", ".join(f'"{kind}s": {entry.vectors[kind]:2}' for kind in OPERATIONS)
    return f'{{"registers": [{registers}], {vectors}, "text": [{text}]}}'


def record(figures: Figures, nvcc: str, vector_access: Mapping[str, tuple[str, ...]]) -> Budget:
    """The budget that what was compiled just meets. Every kernel must have every architecture."""
    kernels = {}
    architectures = sorted({arch for by_arch in figures.values() for arch in by_arch})
    for name, by_arch in figures.items():
        found = [by_arch[arch] for arch in architectures]
        kernels[name] = Entry(
            registers=tuple(granted(kernel.registers) for kernel in found),
            text_bytes=tuple(kernel.text_bytes for kernel in found),
            vectors={
                kind: min(count(kernel, operation, VECTOR_BITS) for kernel in found)
                for kind, operation in OPERATIONS.items()
            },
        )
    return Budget(nvcc, tuple(architectures), vector_access, kernels)


def compare(figures: Figures, budget: Budget) -> list[str]:
    """What departs from the budget, each as a sentence."""
    violations = list(_check_vector_access(figures, budget.vector_access))
    for name in sorted(budget.kernels.keys() - figures.keys()):
        violations.append(f"{name}: expected in the build, got no such kernel.")
    for name, by_arch in sorted(figures.items()):
        entry = budget.kernels.get(name)
        if entry is None:
            violations.append(f"{name}: expected in the budget, got no such entry.")
            continue
        for index, arch in enumerate(budget.architectures):
            if arch in by_arch:
                violations += _compare_kernel(name, by_arch[arch], entry, index)
    return violations


def _compare_kernel(name: str, kernel: Kernel, entry: Entry, index: int) -> Iterator[str]:
    what = f"{name} sm_{kernel.arch}"
    registers = entry.registers[index]
    if kernel.registers > registers:
        yield f"{what}: expected at most {registers} registers, got {kernel.registers}."
    text_bytes = entry.text_bytes[index]
    if kernel.text_bytes > MAX_TEXT_GROWTH * text_bytes:
        growth = 100 * kernel.text_bytes / text_bytes - 100
        yield (
            f"{what}: expected some {text_bytes} bytes of code, got {kernel.text_bytes} "
            f"({growth:.0f} % more)."
        )
    for kind, least in entry.vectors.items():
        found = count(kernel, OPERATIONS[kind], VECTOR_BITS)
        if found < least:
            yield f"{what}: expected {least} {kind}s of {VECTOR_BITS} bits, got {found}."


def _check_vector_access(
    figures: Figures, vector_access: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """What holds whatever figures were recorded: vector paths have vector accesses."""
    families = {family(name) for name in figures}
    for name in sorted(vector_access.keys() - families):
        yield f"vector_access of {name}: expected a kernel of that name, got none."
    for name in sorted(families - vector_access.keys()):
        yield (
            f"{name}: expected an entry in vector_access that says which of "
            f"{list(OPERATIONS)} it does {VECTOR_BITS} bits at a time, got none."
        )
    for name, by_arch in sorted(figures.items()):
        for kind in vector_access.get(family(name), ()):
            for arch, kernel in sorted(by_arch.items()):
                if count(kernel, OPERATIONS[kind], VECTOR_BITS) == 0:
                    yield f"{name} sm_{arch}: expected {kind}s of {VECTOR_BITS} bits, got none."
