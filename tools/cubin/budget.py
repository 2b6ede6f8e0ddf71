# SPDX-License-Identifier: BSD-3-Clause
"""budget.json: the figures of every kernel that a person has looked at.

It has one line per kernel; lists have one number per architecture. `vector_access` is edited by
hand. It says by name which kernels must load or store 16 bytes at a time, and whether these
accesses "stream", that is, ask the caches to evict their lines first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cubin import CannotCheckError, Kernel, granted

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
        kernels = {name: Entry(**line) for name, line in data.pop("kernels").items()}
        budget = Budget(**data, kernels=kernels)
        for name, entry in kernels.items():
            if not len(entry.registers) == len(entry.text) == len(budget.architectures):
                raise ValueError(f"{name} needs {len(budget.architectures)} numbers in each list")
        return budget
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotCheckError(
            f"expected a budget in {path}, got {type(error).__name__}: {error}. Correct it."
        ) from error


def dump(budget: Budget) -> str:
    """The text of budget.json."""
    access = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(kinds)}"
        for name, kinds in sorted(budget.vector_access.items())
    )
    kernels = ",\n".join(
        f"    {json.dumps(name) + ':':<60}{_line(entry)}"
        for name, entry in sorted(budget.kernels.items())
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
    return f'{{"registers": [{registers}], {counts}, "text": [{text}]}}'


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
