# SPDX-License-Identifier: BSD-3-Clause
"""Checks that layers include and import lower layers only, and that SIMD objects are isolated.

Layers are the folders in csrc, the folders within api and ops, and the Python package's modules.

With --build-dir, the program also reads the symbols in objects that are compiled once per
instruction level. If such an object shared a weak symbol with other objects, the linker could pick
the AVX-512 definition for every machine (Note [One object per instruction level] in
csrc/kernels/cpu/isa.h).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".in", ".py"}
INCLUDE = r'^\s*#\s*include\s*[<"]'

TORCH = r"(torch|ATen|c10|caffe2)/"
PYTHON = r"(pybind11/|Python\.h$|torch/csrc/utils/pybind\.h$|torch/extension\.h$)"
CUDA = r"(cuda[_./]|cuda_runtime|cub/|cooperative_groups|curand)"
ABOVE_KERNELS = "ops/|api/|bindings/|torchfuse/"

#: Includes that are forbidden in a folder (csrc/README.md); the first matching folder decides.
RULES = {
    # Plain math for both g++ and nvcc.
    "kernels/functors/": f"{TORCH}|{PYTHON}|{CUDA}|kernels/(cpu|cuda|instantiate)/|{ABOVE_KERNELS}",
    "kernels/common/": f"{TORCH}|{PYTHON}|kernels/(cpu|cuda|functors)/|{ABOVE_KERNELS}",
    "kernels/cpu/": f"{TORCH}|{PYTHON}|{CUDA}|kernels/cuda/|{ABOVE_KERNELS}",
    "kernels/": f"{TORCH}|{PYTHON}|{ABOVE_KERNELS}",
    # Ops call kernels through kernels/*.h and never include CUDA kernels.
    "ops/": rf"{PYTHON}|torch/(all|torch)\.h$|.*\.cuh$|kernels/cuda/|kernels/cpu/(?!isa\.h$)"
    r"|api/|bindings/|torchfuse/(optim|amp|nn|parallel)/",
    # The C++ classes and the bindings use public headers only. Only public headers are installed.
    "api/": f"{PYTHON}|kernels/|ops/|bindings/",
    "include/": f"{PYTHON}|kernels/|ops/|api/|bindings/",
    "bindings/": "kernels/|ops/|api/",
}

#: Ordered folders and modules: a pattern of paths, a pattern of lines that use another folder, and
#: the order from the highest down. A folder may use lower folders and folders without an order.
ORDERS = (
    (
        r"csrc/(?:api|include/torchfuse)/(\w+)",
        rf"{INCLUDE}(?:api|torchfuse)/(\w+)[/.]",
        "checkpoint amp parallel optim nn",
    ),
    (
        r"csrc/(?:ops|include/torchfuse)/(\w+)",
        rf"{INCLUDE}(?:ops|torchfuse)/(\w+)[/.]",
        "losses layer_norm batch_norm fused_step multi_tensor distributed launch",
    ),
    (
        r"python/torchfuse/(\w+)",
        r"^ *(?:from torchfuse import|(?:from|import) torchfuse\.) *(\w+)",
        "apex testing convert amp parallel clip_grad optimizers _C",
    ),
)


def check_file(path: str, text: str) -> Iterator[str]:
    """Yields violations in one file as messages; `path` is relative to the repository."""
    folder = next((folder for folder in RULES if path.startswith(f"csrc/{folder}")), None)
    if folder is not None:
        for name in re.findall(rf'{INCLUDE}([^>"]+)', text, re.MULTILINE):
            if re.match(RULES[folder], name):
                yield f"{path}: expected no include of <{name}> below csrc/{folder}: csrc/README.md"
    for place, use, names in ORDERS:
        own, order = re.match(place, path), names.split()
        if own is not None and own[1] in order:
            above = order[: order.index(own[1])]
            for name in re.findall(use, text, re.MULTILINE):
                if name in above:
                    yield f"{path}: expected {own[1]} to use none of {', '.join(above)}, got {name}"


def check_files() -> Iterator[str]:
    """Yields violations in the source tree."""
    for folder in ("csrc", "python/torchfuse"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in SUFFIXES:
                yield from check_file(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))


def check_objects(build_dir: Path) -> Iterator[str]:
    """Yields violations in a build's objects for all instruction levels.

    Another object's definition may replace a weak (W, V) or unique (u) symbol, except for symbols
    in the level's namespace, which no other object defines. binutils cannot demangle some
    templates, so mangled names are compared.
    """
    targets = build_dir / "csrc/kernels/CMakeFiles"
    on_aarch64 = (targets / "torchfuse_kernels_neon.dir").exists()
    for level in ("baseline", "neon") if on_aarch64 else ("baseline", "avx2", "avx512"):
        folder = targets / f"torchfuse_kernels_{level}.dir"
        objects = sorted(folder.rglob("*.o"))
        if not objects:
            yield f"{folder}: expected objects, got none. Build torchfuse first."
        for path in objects:
            listing = subprocess.check_output(["nm", "--defined-only", str(path)], text=True)
            for symbol in re.findall(r"^[0-9a-f]+ [WVu] (.+)$", listing, re.MULTILINE):
                if f"3cpu{len(level)}{level}" not in symbol:
                    yield (
                        f"{level}/{path.name}: expected weak symbols in namespace {level} only, "
                        f"got {symbol}. Force it inline, or move it into the namespace."
                    )


def main(arguments: list[str] | None = None) -> int:
    """Prints every violation; returns 1 if there is one."""
    parser = argparse.ArgumentParser(description="Checks the layers of csrc.")
    parser.add_argument("--build-dir", type=Path, help="also check the objects of this build")
    options = parser.parse_args(arguments)
    violations = [*check_files()]
    if options.build_dir is not None:
        violations += check_objects(options.build_dir)
    print(*violations, f"check_layers: {len(violations)} violations", sep="\n")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
