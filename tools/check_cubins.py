# SPDX-License-Identifier: BSD-3-Clause
"""Checks the CUDA kernels' machine code for every architecture, without a GPU.

The program reads a library, built for all architectures, with NVIDIA's cuobjdump. A kernel must not
use spills, local memory or a stack. As many blocks must be resident as the launch bounds demand.
Arguments and static shared memory must stay within limits. tools/cubin/budget.json has a line per
kernel, for all forms (dtypes and alignments). A form must not use more registers than recorded, or
25 % more code. All forms together must not lose 128-bit accesses. Cache hints and the number of
forms must not change. After a review, --update records the new figures.

Exit status: 0 without violations or without CUDA; 1 for violations; 2 if nothing can be checked.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from cubin.budget import dump, load, record, violations
from cubin.cuobjdump import CannotCheckError, find_cuobjdump, read

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "tools/cubin/budget.json"


def cmake_cache(library: Path) -> dict[str, str]:
    """Returns the CMake cache of the build that contains a library; empty outside a build."""
    caches = (folder / "CMakeCache.txt" for folder in library.resolve().parents)
    text = next((path.read_text(encoding="utf-8") for path in caches if path.is_file()), "")
    return dict(re.findall(r"^(\w+):\w+=(.*)$", text, re.MULTILINE))


def check(library: Path, update: bool) -> int:
    """Compares a library with the budget, or records it; returns the exit status.

    Raises:
        CannotCheckError: the library cannot be checked.
    """
    cache = cmake_cache(library)
    nvcc = re.sub(".*NOTFOUND$", "", cache.get("CMAKE_CUDA_COMPILER", ""))
    if not nvcc and cache.get("TORCHFUSE_WITH_CUDA", "ON").upper() in ("AUTO", "OFF"):
        print("check_cubins: skipped, the build has no CUDA")
        return 0
    if not library.is_file():
        raise CannotCheckError(f"expected a library in {library}, got none. Build it first.")
    cuobjdump = find_cuobjdump(nvcc or shutil.which("nvcc"))
    print(f"check_cubins: {cuobjdump} reads {library}", flush=True)
    figures, compiler = read(cuobjdump, library)
    budget = load(BUDGET)
    wanted, got = {*budget.architectures}, {arch for own in figures.values() for arch in own}
    if not (wanted <= got if update else wanted == got):
        raise CannotCheckError(
            f"expected machine code for {sorted(wanted)}, got it for {sorted(got)}. Build with the "
            "default CMAKE_CUDA_ARCHITECTURES."
        )
    if update:
        budget = record(figures, compiler, budget.vector_access)
        BUDGET.write_text(dump(budget), encoding="utf-8")
        print(f"check_cubins: recorded in {BUDGET}; read its diff before you commit it")
    found = list(violations(figures, budget))
    for line in found:
        print(line, file=sys.stderr)
    print(
        f"check_cubins: {len(figures)} kernels x {len(got)} architectures: {len(found)} violations"
    )
    if found and compiler != budget.nvcc:
        print(f"The budget is nvcc {budget.nvcc}'s, this is {compiler}'s code.", file=sys.stderr)
    if found:
        print("Where new figures are right, record them with --update.", file=sys.stderr)
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the check from the command line."""
    parser = argparse.ArgumentParser(description="Checks the machine code of the CUDA kernels.")
    library = ROOT / "build/release/csrc/kernels/libtorchfuse_kernels.so"
    parser.add_argument("--library", type=Path, default=library, metavar="FILE")
    parser.add_argument("--update", action="store_true", help="record the figures")
    options = parser.parse_args(arguments)
    try:
        return check(options.library, options.update)
    except CannotCheckError as error:
        print(f"check_cubins: cannot check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
