# SPDX-License-Identifier: BSD-3-Clause
"""What building, rebuilding and importing torchfuse cost, with the targets beside the figures.

Example:
    python benchmarks/build.py --out build/benchmarks/build.json
    python benchmarks/build.py --only cpu

Builds wheels from nothing as `pip install .` does, but with the build tools of this environment:
those of pip's own are gone when a rebuild needs them. Run it on a quiet machine: it uses all
processors.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

import machine

ROOT = Path(__file__).resolve().parent.parent
TOUCHED = ROOT / "csrc" / "kernels" / "functors" / "adam.h"
KINDS = {"cpu": "OFF", "cuda": "ON"}
#: Upper limits on two cores.
TARGETS = {
    "cpu: build from nothing, s": 360.0,
    "cuda: build from nothing, s": 720.0,
    "cpu: slowest file, s": 25.0,
    "cuda: slowest file, s": 25.0,
    "cpu: rebuild after touching a functor, s": 60.0,
    "cuda: rebuild after touching a functor, s": 60.0,
    "cuda: wheel, MB": 20.0,
    "import after torch, ms": 50.0,
}
IMPORT = """
import time, torch
start = time.perf_counter()
import torchfuse
print(time.perf_counter() - start)
"""


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=(*KINDS, "import"), help="measure this alone")
    parser.add_argument("--out", type=Path, help="also write a result file")
    return parser.parse_args()


def timed(*command: str, **environment: str) -> float:
    """Runs a command and returns its wall time in seconds; its output is shown if it fails."""
    start = time.perf_counter()
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout}\nbuild.py: this failed: {' '.join(command)}")
    return time.perf_counter() - start


def slowest_file(build: Path) -> tuple[str, float]:
    """The object that took longest, from ninja's own log: start and end in milliseconds."""
    slowest = ("", 0.0)
    for line in (build / ".ninja_log").read_text().splitlines()[1:]:
        start, end, _, output, *_ = line.split("\t")
        seconds = (int(end) - int(start)) / 1000
        if output.endswith(".o") and seconds > slowest[1]:
            slowest = (output, seconds)
    return slowest


def measure_build(kind: str, folder: Path) -> dict[str, Any]:
    """Builds a wheel from nothing, then again after the functor of Adam was touched."""
    build = folder / "build"
    switches = {"TORCHFUSE_BUILD_DIR": str(build), "TORCHFUSE_WITH_CUDA": KINDS[kind]}
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    wheel = [*pip_wheel, "--wheel-dir", str(folder), "."]
    seconds = timed(*wheel, **switches)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        files = len(archive.namelist())
    name, slowest = slowest_file(build)
    status = TOUCHED.stat()
    os.utime(TOUCHED)
    try:
        ninja = Path(sys.executable).with_name("ninja")
        rebuild = timed(str(ninja), "-C", str(build), "torchfuse", "torchfuse_C")
    finally:
        os.utime(TOUCHED, ns=(status.st_atime_ns, status.st_mtime_ns))
    return {
        f"{kind}: build from nothing, s": seconds,
        f"{kind}: slowest file, s": slowest,
        f"{kind}: slowest file": name,
        f"{kind}: rebuild after touching a functor, s": rebuild,
        f"{kind}: wheel, MB": path.stat().st_size / 1e6,
        f"{kind}: files in the wheel": files,
    }


def measure_import() -> dict[str, Any]:
    """Median of seven fresh processes of this environment."""
    samples = [
        float(subprocess.check_output([sys.executable, "-c", IMPORT], cwd=tempfile.gettempdir()))
        for _ in range(7)
    ]
    return {"import after torch, ms": 1000 * statistics.median(samples)}


def main() -> int:
    """Measures; returns 1 if a target is missed."""
    arguments = parse_arguments()
    figures: dict[str, Any] = {}
    if arguments.only in (None, "import"):
        figures |= measure_import()
    for kind in KINDS:
        if arguments.only in (None, kind):
            with tempfile.TemporaryDirectory() as folder:
                figures |= measure_build(kind, Path(folder))

    missed = 0
    for name, value in figures.items():
        target = TARGETS.get(name)
        shown = f"{value:10.1f}" if isinstance(value, float) else f"{value!s:>10}"
        verdict = "" if target is None else f"  (at most {target:g})"
        if target is not None and value > target:
            missed += 1
            verdict += "  MISSED"
        print(f"{name:<45}{shown}{verdict}")
    if arguments.out is not None:
        result = {
            "command": ["python", "benchmarks/build.py", *sys.argv[1:]],
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "git": {"sha": machine.git("rev-parse", "HEAD")},
            "cpu": machine.cpu_model(),
            "processors": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "figures": figures,
            "targets": TARGETS,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
