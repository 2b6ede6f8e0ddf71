# SPDX-License-Identifier: BSD-3-Clause
"""Checks the machine code of the CUDA kernels, for every architecture, without a GPU.

The kernels of a build are compiled to cubins with the build's own compiler and flags, and read by
tools/cubin. Every kernel must do without spills, local memory and stack, let as many blocks be
resident as its launch bounds ask for, and respect the limits of arguments and static shared memory.
tools/cubin/budget.json holds its registers, 128-bit accesses and code size: a kernel that takes
more registers, has fewer 128-bit accesses or grows by more than a quarter fails, and so do kernels
without an entry and entries without a kernel. After review, --update records the figures anew.

Exit status: 0 all is well, or the build has no CUDA on purpose; 1 violations; 2 cannot check.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cubin import budget as budgets
from cubin.build import (
    Compiler,
    cuda_sources,
    nvcc_version,
    reason_for_no_cuda,
    release_of,
)
from cubin.calibration import calibrate
from cubin.elf import Kernel
from cubin.errors import CannotCheckError
from cubin.names import demangle, family, short_name
from cubin.rules import VECTOR_BITS, check_kernel, count

ROOT = Path(__file__).resolve().parent.parent
TARGET = "torchfuse_kernels"
ARCHITECTURES = (80, 90, 100, 120)  # of a budget that is still to be written


def name_kernels(kernels: Sequence[Kernel]) -> dict[str, dict[int, Kernel]]:
    """Sorts kernels by short name and architecture.

    Raises:
        CannotCheckError: two kernels have the same short name.
    """
    figures: dict[str, dict[int, Kernel]] = {}
    names = map(short_name, demangle([kernel.symbol for kernel in kernels]))
    for name, kernel in zip(names, kernels, strict=True):
        by_arch = figures.setdefault(name, {})
        if kernel.arch in by_arch:
            raise CannotCheckError(f"expected one kernel {name} for sm_{kernel.arch}, got two.")
        by_arch[kernel.arch] = kernel
    return dict(sorted(figures.items()))


def check_rules(figures: budgets.Figures) -> list[str]:
    """Violations of what holds without a budget."""
    return [
        violation
        for name, by_arch in figures.items()
        for kernel in by_arch.values()
        for violation in check_kernel(name, kernel)
    ]


def _cell(kernel: Kernel) -> str:
    loads, stores = (count(kernel, operation, VECTOR_BITS) for operation in ("LDG", "STG"))
    return f"{kernel.registers:3} {loads:2}/{stores:<2} {kernel.text_bytes:6}"


def _summary_cell(kernels: Sequence[Kernel]) -> str:
    text = sum(kernel.text_bytes for kernel in kernels)
    return f"{max(kernel.registers for kernel in kernels):3} {text:8}"


def table(figures: budgets.Figures, architectures: Sequence[int], verbose: bool) -> str:
    """The figures as text: a row per kernel, or one per group of kernels that share a name."""
    rows: list[tuple[str, ...]] = []
    if verbose:
        head = "registers, 128-bit loads/stores, bytes of code"
        for name, by_arch in figures.items():
            rows.append((name, *(_cell(by_arch[arch]) for arch in architectures)))
    else:
        head = "most registers, bytes of code of all"
        for group in sorted({family(name) for name in figures}):
            members = [by_arch for name, by_arch in figures.items() if family(name) == group]
            cells = (_summary_cell([m[arch] for m in members]) for arch in architectures)
            rows.append((f"{group} ({len(members)})", *cells))
    rows.insert(0, (head, *(f"sm_{arch}" for arch in architectures)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def check(options: argparse.Namespace) -> int:
    """Does what the options say; returns the exit status.

    Raises:
        CannotCheckError: there is nothing to check, or no way to.
    """
    reason = reason_for_no_cuda(options.build_dir)
    if reason is not None:
        print(f"check_cubins: skipped, CPU-only build ({reason})")
        return 0
    sources = cuda_sources(options.build_dir, TARGET)
    nvcc = sources[0].command[0]
    version = nvcc_version(nvcc)
    known = options.budget.is_file() or not options.update
    budget = budgets.load(options.budget) if known else budgets.Budget("", ARCHITECTURES, {}, {})
    targeted = {arch for source in sources for arch in source.architectures}
    architectures = sorted(set(options.arch or {*budget.architectures, *targeted}))

    compiler = Compiler(options.build_dir.resolve() / "cubins", version, options.jobs)
    calibrate(compiler, nvcc, architectures)
    compiled = compiler.compile(sources, architectures)
    figures = name_kernels([kernel for one in compiled.values() for kernel in one.kernels])
    print(table(figures, architectures, options.verbose))

    if options.update:
        budget = budgets.record(figures, release_of(version), budget.vector_access)
        options.budget.write_text(budgets.dump(budget), encoding="utf-8")
        print(f"check_cubins: recorded in {options.budget}; read its diff before you commit it")
    return report(figures, budget, architectures, release_of(version))


def report(
    figures: budgets.Figures, budget: budgets.Budget, architectures: Sequence[int], release: str
) -> int:
    """Prints the verdict; returns the exit status."""
    violations = [*check_rules(figures), *budgets.compare(figures, budget)]
    size = f"{len(figures)} kernels x {len(architectures)} architectures"
    for arch in architectures:
        if arch not in budget.architectures:
            print(f"check_cubins: sm_{arch} is not in the budget; only its hard limits are checked")
    if not violations:
        print(f"check_cubins: {size} within budget")
        return 0
    for violation in violations:
        print(violation, file=sys.stderr)
    if release != budget.nvcc:
        print(
            f"The budget was recorded with nvcc {budget.nvcc}, this is {release}: figures may "
            "differ for that reason.",
            file=sys.stderr,
        )
    print(
        f"check_cubins: {size}, {len(violations)} violations. Where new figures are right, record "
        "them with --update; it does not lift the limits.",
        file=sys.stderr,
    )
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Runs the check from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build/dev", metavar="DIR")
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        metavar="NN",
        help="default: those of the budget and those that the build makes code for",
    )
    parser.add_argument("--budget", type=Path, default=ROOT / "tools/cubin/budget.json")
    parser.add_argument(
        "--update",
        action="store_true",
        help="record the figures; the budget then has exactly the architectures of this run",
    )
    parser.add_argument("--verbose", action="store_true", help="a row per kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    try:
        return check(parser.parse_args(arguments))
    except CannotCheckError as error:
        print(f"check_cubins: cannot check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
