# SPDX-License-Identifier: BSD-3-Clause
"""Runs a program under callgrind and reads what it counted.

The program itself says what is counted, with `counting()`.

Valgrind shows every program the same processor with AVX2, whatever the machine is, as long as that
has AVX2 itself. So glibc, torch and torchfuse choose the same code on Intel and on AMD. What the
environment could change is pinned here.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: What the program takes over from the environment. Tunables of glibc's malloc are not among it.
KEPT = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
PINNED = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

#: The functions of the C library that allocate.
ALLOCATING = frozenset(
    ("malloc", "calloc", "realloc", "aligned_alloc", "memalign", "posix_memalign", "valloc")
)

#: A name, and the file of the library or program that has it.
Function = tuple[str, str]


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Runs in valgrind: counts what is done within, and writes it to a dump of its own."""
    import torch

    gc.collect()
    gc.disable()
    torch._C._valgrind_toggle()
    try:
        yield
    finally:
        torch._C._valgrind_toggle_and_dump_stats()
        gc.enable()


def run(command: Sequence[str], folder: Path, expected: int) -> list[Profile]:
    """Runs a program that counts so many times; returns what it counted, in order.

    Raises:
        RuntimeError: valgrind is missing, or the program wrote fewer dumps.
        CalledProcessError: the program failed.
    """
    program = shutil.which("valgrind")
    if program is None:
        raise RuntimeError("callgrind: expected valgrind on the PATH, got none. Install it.")
    # Counts of single instructions, and of a function that allocates by its callers: see Profile.
    options = ["--dump-instr=yes", "--compress-pos=no", "--compress-strings=no"]
    options += [f"--separate-callers3={name}" for name in sorted(ALLOCATING)]
    options += ["--collect-atstart=no", f"--callgrind-out-file={folder}/dump"]
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    subprocess.run(
        [program, "--tool=callgrind", "--quiet", *options, *command],
        env={**kept, **PINNED},
        check=True,
    )
    # The dumps are dump.1, dump.2, ...; the end of the program writes one more.
    written = [folder / f"dump.{index}" for index in range(1, expected + 1)]
    missing = [dump.name for dump in written if not dump.exists()]
    if missing:
        raise RuntimeError(f"callgrind: expected {expected} dumps, got no {missing[0]}")
    return [Profile.read(dump.read_text(encoding="utf-8")) for dump in written]


@dataclasses.dataclass(frozen=True)
class Profile:
    """How often each instruction of each function was executed.

    Callgrind's own numbers of calls are of no use here: they include calls outside of what was
    counted. But a function is called as often as its first instruction is executed. One that
    allocates is a function of its own for each chain of three callers: malloc'make'step'main.

    Attributes:
        executed: by function and address.
    """

    executed: Mapping[Function, Mapping[int, int]]

    @classmethod
    def read(cls, dump: str) -> Profile:
        """Reads the text of a dump with addresses and without compression."""
        executed: dict[Function, collections.Counter[int]] = {}
        library, function, in_call = "", ("", ""), False
        for line in dump.partition("\nevents: Ir\n")[2].splitlines():
            kind, _, value = line.partition("=")
            if line.startswith("0x"):
                if not in_call:
                    address, _, count = line.split()
                    counts = executed.setdefault(function, collections.Counter())
                    counts[int(address, 16)] += int(count)
                in_call = False
            elif kind == "ob":
                library = Path(value).name
            elif kind == "fn":
                function = (value, library)
            elif kind == "calls":
                in_call = True  # what the called function costs is in the next line
        if not executed:
            raise RuntimeError("callgrind: expected counts of instructions in the dump, got none")
        return cls(executed)

    def functions(self) -> collections.Counter[Function]:
        """The instructions in each function, without those of the functions that it calls."""
        own: collections.Counter[Function] = collections.Counter()
        for (name, library), counts in self.executed.items():
            own[name.partition("'")[0], library] += sum(counts.values())
        return own

    def instructions(self) -> int:
        """All instructions."""
        return self.functions().total()

    def allocations(self) -> collections.Counter[str]:
        """How often each function had the C library allocate, itself or by C++'s new.

        What one allocating function calls of another is one allocation.
        """
        calls: collections.Counter[str] = collections.Counter()
        for (name, _), counts in self.executed.items():
            called, *callers = name.split("'")
            if called in ALLOCATING and callers and callers[0] not in ALLOCATING:
                asking = [caller for caller in callers if not caller.startswith("operator new")]
                calls[(asking or callers)[0]] += counts[min(counts)]
        return calls
