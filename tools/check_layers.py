# SPDX-License-Identifier: BSD-3-Clause
"""Checks that arrows between the layers point down only, and that SIMD objects keep to themselves.

Rules of includes (csrc/README.md): kernels know neither torch nor ops; ops know kernel headers but
no driver; the C++ classes and the bindings know public headers only. With --build-dir it also reads
the symbols of the objects that are compiled once per instruction level: a weak symbol that they
share with other objects could be linked in its AVX-512 form for every machine (Note [One object per
instruction level] in csrc/kernels/cpu/isa.h).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".in"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

TORCH = r"(torch|ATen|c10|caffe2)/"
PYTHON = r"(pybind11/|Python\.h$|torch/csrc/utils/pybind\.h$|torch/extension\.h$)"
CUDA = r"(cuda[_./]|cuda_runtime|cub/|cooperative_groups|curand)"
ABOVE_KERNELS = "ops/|api/|bindings/|torchfuse/"


#: What files under a folder must not include, and why; the first folder that matches decides.
RULES = {
    "csrc/kernels/functors/": (
        f"{TORCH}|{PYTHON}|{CUDA}|kernels/(cpu|cuda|instantiate)/|{ABOVE_KERNELS}",
        "functors are plain math, shared by g++ and nvcc",
    ),
    "csrc/kernels/common/": (
        f"{TORCH}|{PYTHON}|kernels/(cpu|cuda|functors)/|{ABOVE_KERNELS}",
        "kernels/common is below everything",
    ),
    "csrc/kernels/cpu/": (
        f"{TORCH}|{PYTHON}|{CUDA}|kernels/cuda/|{ABOVE_KERNELS}",
        "CPU kernels know neither torch nor CUDA",
    ),
    "csrc/kernels/": (f"{TORCH}|{PYTHON}|{ABOVE_KERNELS}", "kernels do not know torch"),
    "csrc/ops/": (
        rf"{PYTHON}|torch/(all|torch)\.h$|.*\.cuh$|kernels/cuda/|kernels/cpu/(?!isa\.h$)"
        r"|api/|bindings/|torchfuse/(optim|amp|nn|parallel)/",
        "ops call kernels through kernels/*.h and know no driver",
    ),
    "csrc/api/": (
        f"{PYTHON}|kernels/|ops/|bindings/",
        "the C++ classes use public headers only and hold no numerics",
    ),
    "csrc/include/": (
        f"{PYTHON}|kernels/|ops/|api/|bindings/",
        "public headers are installed, private ones are not",
    ),
    "csrc/bindings/": ("kernels/|ops/|api/", "bindings use public headers only"),
}


def check_text(path: str, text: str) -> list[str]:
    """Violations in one file, each as a sentence; `path` is relative to the repository."""
    for folder, (forbidden, reason) in RULES.items():
        if path.startswith(folder):
            return [
                f"{path}: expected no include of <{name}>: {reason}."
                for name in INCLUDE.findall(text)
                if re.match(forbidden, name)
            ]
    return []


def check_includes() -> list[str]:
    """Violations of the include rules in the source tree."""
    return [
        violation
        for file in sorted((ROOT / "csrc").rglob("*"))
        if file.suffix in SUFFIXES
        for violation in check_text(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    ]


def check_symbols(name: str, level: str, nm_output: str) -> list[str]:
    """Violations in one object's `nm` listing.

    Weak (W, V) and unique (u) definitions may be replaced by another object's. Only those inside
    the namespace of the level, or about a type of that namespace, belong to this object alone. The
    names are read as they are mangled: there are templates that binutils cannot demangle.
    """
    return [
        f"{name}: expected weak symbols in namespace {level} only, got {symbol}. "
        "Force it inline, or move it into the namespace."
        for symbol in re.findall(r"^[0-9a-f]+ [WVu] (.+)$", nm_output, re.MULTILINE)
        if f"3cpu{len(level)}{level}" not in symbol
    ]


def check_objects(build_dir: Path) -> list[str]:
    """Violations in the objects of all instruction levels of a build."""
    violations = []
    targets = build_dir / "csrc/kernels/CMakeFiles"
    on_aarch64 = (targets / "torchfuse_kernels_neon.dir").exists()
    for level in ("baseline", "neon") if on_aarch64 else ("baseline", "avx2", "avx512"):
        folder = targets / f"torchfuse_kernels_{level}.dir"
        objects = sorted(folder.rglob("*.o"))
        if not objects:
            violations.append(f"{folder}: expected objects, got none. Build torchfuse first.")
        for path in objects:
            listing = subprocess.check_output(["nm", "--defined-only", str(path)], text=True)
            violations += check_symbols(f"{level}/{path.name}", level, listing)
    return violations


def main(arguments: list[str] | None = None) -> int:
    """Prints every violation; returns 1 if there is one."""
    parser = argparse.ArgumentParser(description="Checks the layers of csrc.")
    parser.add_argument("--build-dir", type=Path, help="also check the objects of this build")
    options = parser.parse_args(arguments)
    violations = check_includes()
    if options.build_dir is not None:
        violations += check_objects(options.build_dir)
    for violation in violations:
        print(violation, file=sys.stderr)
    print(f"check_layers: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
