# SPDX-License-Identifier: BSD-3-Clause
"""Checks the machine code of the CUDA kernels, for every architecture, without a GPU.

It reads a library that was built for all architectures, with NVIDIA's cuobjdump. Every kernel must
do without spills, local memory and stack, let as many blocks be resident as its launch bounds ask
for, and respect the limits of arguments and static shared memory. tools/cubin/budget.json holds its
registers, 128-bit accesses, cache hints and code size: a kernel that takes more registers, has
fewer 128-bit accesses or other hints, or grows by more than a quarter fails, and so do kernels
without an entry and entries without a kernel. After review, --update records the figures anew.

Exit status: 0 all is well, or the build has no CUDA on purpose; 1 violations; 2 cannot check.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cubin import CannotCheckError, Kernel, demangle, short_name
from cubin.budget import Figures, dump, load, record, violations
from cubin.cuobjdump import Cuobjdump

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "tools/cubin/budget.json"
_FALSE = re.compile(r"^(OFF|NO|FALSE|N|0|IGNORE|.*NOTFOUND|)$", re.IGNORECASE)


def cmake_cache(library: Path) -> dict[str, str]:
    """What CMake keeps about the build that a library lies in; nothing outside a build."""
    caches = (folder / "CMakeCache.txt" for folder in library.resolve().parents)
    text = next((path.read_text(encoding="utf-8") for path in caches if path.is_file()), "")
    return dict(re.findall(r"^(\w+):\w+=(.*)$", text, re.MULTILINE))


def reason_for_no_cuda(cache: dict[str, str]) -> str | None:
    """Why a build has no CUDA on purpose; None if it has."""
    wish = cache.get("TORCHFUSE_WITH_CUDA", "ON")
    if _FALSE.match(wish):
        return f"TORCHFUSE_WITH_CUDA={wish}"
    if wish.upper() == "AUTO" and _FALSE.match(cache.get("CMAKE_CUDA_COMPILER", "")):
        return "TORCHFUSE_WITH_CUDA=AUTO found no CUDA to build with"
    return None


def name_kernels(kernels: Sequence[Kernel]) -> Figures:
    """Sorts kernels by short name and architecture.

    Raises:
        CannotCheckError: two kernels have the same short name, or one lacks an architecture.
    """
    figures: dict[str, dict[int, Kernel]] = {}
    names = map(short_name, demangle([kernel.symbol for kernel in kernels]))
    for name, kernel in zip(names, kernels, strict=True):
        if kernel.arch in figures.setdefault(name, {}):
            raise CannotCheckError(f"expected one kernel {name} for sm_{kernel.arch}, got two.")
        figures[name][kernel.arch] = kernel
    for name, by_arch in figures.items():
        if missing := {kernel.arch for kernel in kernels} - by_arch.keys():
            raise CannotCheckError(f"expected kernel {name} for sm_{min(missing)}, got none.")
    return dict(sorted(figures.items()))


def check(library: Path, update: bool) -> int:
    """Compares a library with the budget, or records it anew; returns the exit status.

    Raises:
        CannotCheckError: there is nothing to check, or no way to.
    """
    cache = cmake_cache(library)
    reason = reason_for_no_cuda(cache)
    if reason is not None:
        print(f"check_cubins: skipped, CPU-only build ({reason})")
        return 0
    if not library.is_file():
        raise CannotCheckError(
            f"expected a library in {library}, got no such file. Build it with cmake --preset "
            "release and cmake --build --preset release, or name another with --library."
        )
    budget = load(BUDGET)
    cuobjdump = Cuobjdump(cache.get("CMAKE_CUDA_COMPILER") or shutil.which("nvcc"))
    print(f"check_cubins: {cuobjdump.path} {cuobjdump.version} reads {library}", flush=True)

    usage = cuobjdump.usage(library)
    wanted = set(budget.architectures)
    if not (usage.keys() >= wanted if update else usage.keys() == wanted):
        expected, got = (" ".join(f"sm_{arch}" for arch in sorted(of)) for of in (wanted, usage))
        raise CannotCheckError(
            f"expected machine code for {expected} in {library}, got it for {got or 'none'}. Build "
            "it with the default CMAKE_CUDA_ARCHITECTURES."
        )
    figures = name_kernels(cuobjdump.kernels(library, usage))
    compiler = cuobjdump.compiler(library, min(usage))
    if update:
        budget = record(figures, compiler, budget.vector_access)
        BUDGET.write_text(dump(budget), encoding="utf-8")
        print(f"check_cubins: recorded in {BUDGET}; read its diff before you commit it")
    size = f"check_cubins: {len(figures)} kernels x {len(usage)} architectures"
    found = list(violations(figures, budget))
    if not found:
        print(f"{size} within budget")
        return 0
    print(*found, sep="\n", file=sys.stderr)
    if compiler != budget.nvcc:
        print(f"The budget is nvcc {budget.nvcc}'s, this is {compiler}'s code.", file=sys.stderr)
    print(
        f"{size}, {len(found)} violations. Where new figures are right, record them with --update; "
        "it does not lift the limits.",
        file=sys.stderr,
    )
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Runs the check from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    library = ROOT / "build/release/csrc/libtorchfuse.so"
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
