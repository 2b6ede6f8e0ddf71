# SPDX-License-Identifier: BSD-3-Clause
"""Checks that layers include and import lower ones only, and that SIMD objects keep to themselves.

Layers are the folders of csrc, the folders within api and ops, and those of the Python package.

With --build-dir it also reads the symbols of the objects that are compiled once per instruction
level: a weak symbol that they share with other objects could be linked in its AVX-512 form for
every machine (Note [One object per instruction level] in csrc/kernels/cpu/isa.h).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".in", ".py"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

TORCH = r"(torch|ATen|c10|caffe2)/"
PYTHON = r"(pybind11/|Python\.h$|torch/csrc/utils/pybind\.h$|torch/extension\.h$)"
CUDA = r"(cuda[_./]|cuda_runtime|cub/|cooperative_groups|curand)"
ABOVE_KERNELS = "ops/|api/|bindings/|torchfuse/"

#: What a folder's files must not include (csrc/README.md); the first folder that matches decides.
RULES = {
    # Plain math, shared by g++ and nvcc.
    "kernels/functors/": f"{TORCH}|{PYTHON}|{CUDA}|kernels/(cpu|cuda|instantiate)/|{ABOVE_KERNELS}",
    "kernels/common/": f"{TORCH}|{PYTHON}|kernels/(cpu|cuda|functors)/|{ABOVE_KERNELS}",
    "kernels/cpu/": f"{TORCH}|{PYTHON}|{CUDA}|kernels/cuda/|{ABOVE_KERNELS}",
    "kernels/": f"{TORCH}|{PYTHON}|{ABOVE_KERNELS}",
    # Ops call kernels through kernels/*.h and know no driver.
    "ops/": rf"{PYTHON}|torch/(all|torch)\.h$|.*\.cuh$|kernels/cuda/|kernels/cpu/(?!isa\.h$)"
    r"|api/|bindings/|torchfuse/(optim|amp|nn|parallel)/",
    # The C++ classes and the bindings use public headers only, and these are installed alone.
    "api/": f"{PYTHON}|kernels/|ops/|bindings/",
    "include/": f"{PYTHON}|kernels/|ops/|api/|bindings/",
    "bindings/": "kernels/|ops/|api/",
}


#: The folders within a layer, from the highest down. A file includes those below its own folder,
#: and what lies in the layer itself.
ORDERS = {
    "api": ("checkpoint", "amp", "parallel", "optim", "nn"),
    "ops": (
        "losses",
        "layer_norm",
        "batch_norm",
        "fused_step",
        "multi_tensor",
        "distributed",
        "launch",
    ),
}
#: The folders and modules of the Python package that have an order, from the highest down.
PYTHON_ORDER = ("apex", "testing", "convert", "amp", "parallel", "clip_grad", "optimizers", "_C")
IMPORT = re.compile(
    r"^ *(?:from torchfuse import|(?:from|import) torchfuse\.) *(\w+)", re.MULTILINE
)


def check_orders(path: str, text: str) -> list[str]:
    """Violations of the order of folders within a layer, and of the Python package's."""
    parts = path.split("/")
    violations = []
    for layer, order in ORDERS.items():
        # Headers that users include belong to the folder of the same name.
        if parts[:2] not in (["csrc", layer], ["csrc", "include"]):
            continue
        own = (parts[2] if parts[1] == layer else parts[3:][0]).removesuffix(".h")
        if own not in order:
            continue
        below = order[order.index(own) :]
        violations += [
            f"{path}: expected {own} to include {', '.join(below)} only, got <{name}>"
            for name in INCLUDE.findall(text)
            for folder in order
            if re.match(f"({layer}|torchfuse)/{folder}[/.]", name) and folder not in below
        ]
    own_module = parts[2].removesuffix(".py") if path.startswith("python/torchfuse/") else ""
    if own_module in PYTHON_ORDER:
        below = PYTHON_ORDER[PYTHON_ORDER.index(own_module) :]
        violations += [
            f"{path}: expected {own_module} to import {', '.join(below)} only, got {name}"
            for name in IMPORT.findall(text)
            if name in PYTHON_ORDER and name not in below
        ]
    return violations


def check_text(path: str, text: str) -> list[str]:
    """Violations in one file, each as a sentence; `path` is relative to the repository."""
    for folder, forbidden in RULES.items():
        if path.startswith(f"csrc/{folder}"):
            return [
                f"{path}: expected no include of <{name}> below csrc/{folder}: csrc/README.md"
                for name in INCLUDE.findall(text)
                if re.match(forbidden, name)
            ]
    return []


def check_includes() -> list[str]:
    """Violations of the include rules in the source tree."""
    return [
        violation
        for folder in ("csrc", "python/torchfuse")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in SUFFIXES
        for check in (check_text, check_orders)
        for violation in check(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    ]


def check_symbols(name: str, level: str, nm_output: str) -> list[str]:
    """Violations in one object's `nm` listing.

    Another object's definition may replace a weak (W, V) or unique (u) one. Only symbols of the
    level's namespace belong to this object alone. binutils cannot demangle some templates, so the
    mangled names are compared.
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
    print(*violations, f"check_layers: {len(violations)} violations", sep="\n")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
