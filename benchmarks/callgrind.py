# SPDX-License-Identifier: BSD-3-Clause
"""Runs a program under callgrind and reads the instruction counts.

The program marks the code to count with `counting()`.

Valgrind emulates the same AVX2 processor on every machine that supports AVX2, so glibc, torch and
torchfuse choose the same code on Intel and AMD. This module also pins environment variables that
could change the counts.
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

#: Environment variables passed to the program. glibc's malloc tunables are left out.
KEPT = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
PINNED = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

#: The C library's allocation functions.
ALLOCATING = frozenset(
    ("malloc", "calloc", "realloc", "aligned_alloc", "memalign", "posix_memalign", "valloc")
)

#: A function's name, and the file name of the library or program that contains the function.
Function = tuple[str, str]


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Counts the code in the context, and writes a separate dump; runs in valgrind only."""
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
    """Runs a program that enters `counting()` `expected` times; returns the profiles in order."""
    program = shutil.which("valgrind")
    if program is None:
        raise RuntimeError("callgrind: expected valgrind on the PATH, got none. Install it.")
    # Count each instruction, and separate allocation functions by caller: see Profile.
    options = ["--dump-instr=yes", "--compress-pos=no", "--compress-strings=no"]
    options += [f"--separate-callers3={name}" for name in sorted(ALLOCATING)]
    options += ["--collect-atstart=no", f"--callgrind-out-file={folder}/dump"]
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    subprocess.run(
        [program, "--tool=callgrind", "--quiet", *options, *command],
        env={**kept, **PINNED},
        check=True,
    )
    # The dumps are dump.1, dump.2 and so on. Another dump is written when the program ends.
    written = [folder / f"dump.{index}" for index in range(1, expected + 1)]
    missing = [dump.name for dump in written if not dump.exists()]
    if missing:
        raise RuntimeError(f"callgrind: expected {expected} dumps, got no {missing[0]}")
    return [Profile.read(dump.read_text(encoding="utf-8")) for dump in written]


@dataclasses.dataclass(frozen=True)
class Profile:
    """Execution counts of each function's instructions.

    Callgrind's own call counts include calls outside `counting()`. Instead, a function's call count
    is the execution count of the function's first instruction. Allocation functions appear once for
    each chain of three callers, as in malloc'make'step'main.

    Attributes:
        executed: Execution counts by function and instruction address.
    """

    executed: Mapping[Function, Mapping[int, int]]

    @classmethod
    def read(cls, dump: str) -> Profile:
        """Parses an uncompressed dump with addresses."""
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
                in_call = True  # the next line contains the called function's cost
        if not executed:
            raise RuntimeError("callgrind: expected counts of instructions in the dump, got none")
        return cls(executed)

    def functions(self) -> collections.Counter[Function]:
        """Returns the executed instructions per function, excluding callees."""
        own: collections.Counter[Function] = collections.Counter()
        for (name, library), counts in self.executed.items():
            own[name.partition("'")[0], library] += sum(counts.values())
        return own

    def instructions(self) -> int:
        """Returns the number of executed instructions."""
        return self.functions().total()

    def allocations(self) -> collections.Counter[str]:
        """Returns each function's number of allocations, directly or through operator new.

        If an allocation function calls another allocation function, one allocation is counted.
        """
        calls: collections.Counter[str] = collections.Counter()
        for (name, _), counts in self.executed.items():
            called, *callers = name.split("'")
            if called in ALLOCATING and callers and callers[0] not in ALLOCATING:
                asking = [caller for caller in callers if not caller.startswith("operator new")]
                calls[(asking or callers)[0]] += counts[min(counts)]
        return calls
