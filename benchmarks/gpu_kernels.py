# SPDX-License-Identifier: BSD-3-Clause
"""Launches five kernels once for NVIDIA's profiler `ncu`, or reads the profiler's figures.

Example:
    ncu --profile-from-start off --export kernels python benchmarks/gpu_kernels.py
    ncu --import kernels.ncu-rep --csv --page raw > kernels.csv
    python benchmarks/gpu_kernels.py --read kernels.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchfuse
from suites.layers import LayerCase
from torchfuse.optimizers import FusedAdam

#: Names of our figures by ncu metric.
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__bytes_read.sum": "mb_read",
    "dram__bytes_write.sum": "mb_written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__inst_executed.avg.per_cycle_elapsed": "instructions_per_cycle",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "smsp__inst_executed.sum": "warp_instructions",
    "launch__registers_per_thread": "registers",
    "launch__waves_per_multiprocessor": "waves",
}
#: Factors to microseconds and megabytes.
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
UNITS |= {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}


def workload(small: bool) -> None:
    """Launches bf16 Adam, a norm, batch norm statistics, cross entropy and layer norm backward."""
    device = torch.device("cuda")
    param = torch.nn.Parameter(torch.ones(2**12 if small else 2**26, device=device).bfloat16())
    param.grad = torch.full_like(param, 0.5, requires_grad=False)
    optimizer = FusedAdam([param], lr=1e-3, state_dtype=torch.bfloat16)
    grads = [torch.ones(2**12 if small else 2**28, device=device)]
    layers = (
        ("batch_norm", (2, 8, 7, 7) if small else (32, 64, 112, 112), torch.bfloat16, "forward"),
        ("cross_entropy", (16, 1001) if small else (4096, 50257), torch.bfloat16, "forward"),
        ("layer_norm", (16, 64) if small else (4096, 1024), torch.float32, "backward"),
    )
    calls: list[Callable[[], object]] = [optimizer.step]
    calls += [lambda: torchfuse.ops.multi_tensor_l2_norm(grads)]
    for layer, shape, dtype, direction in layers:
        case = LayerCase(layer, layer, shape, dtype, direction)
        calls.append(case.prepare(device, 0)[case.subject])
    for call in calls:
        call()
    torch.cuda.synchronize()
    if not small:
        torch.cuda.cudart().cudaProfilerStart()
    for call in calls:
        call()
    torch.cuda.synchronize()
    if not small:
        torch.cuda.cudart().cudaProfilerStop()


def read(text: str) -> dict[str, dict[str, float]]:
    """Returns the figures of each torchfuse kernel in ncu's raw page."""
    head, units, *rows = csv.reader(text[text.index('"ID"') :].splitlines())
    figures: dict[str, dict[str, float]] = {}
    for row in rows:
        if len(row) != len(head):  # a warning from the profiler
            continue
        cells = dict(zip(head, row, strict=True))
        name = re.search(r"(\w+)_kernel", cells["Kernel Name"])
        if name is None or "torchfuse" not in cells["Kernel Name"]:
            continue
        kept: dict[str, float] = {}
        for metric, unit in zip(head, units, strict=True):
            number = cells[metric].replace(",", "")
            if metric in METRICS and re.fullmatch(r"[-+.\de]+", number):  # or "n/a"
                value = float(number) * UNITS.get(unit, 1.0)
                kept[METRICS[metric]] = float(f"{value:.4g}")
        figures[name[1]] = kept
    return figures


def main() -> int:
    """Runs the workload, or reads the figures from a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a rehearsal without a profiler")
    parser.add_argument("--read", type=Path, help="a page of raw metrics, as CSV")
    options = parser.parse_args()
    if options.read is None:
        workload(options.small)
        return 0
    figures: dict[str, Any] = read(options.read.read_text(encoding="utf-8"))
    print(json.dumps(figures))
    return 0 if figures else 1


if __name__ == "__main__":
    sys.exit(main())
