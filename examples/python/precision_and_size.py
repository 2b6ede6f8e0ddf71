# SPDX-License-Identifier: BSD-3-Clause
"""fp32 against mixed precision: time per step and peak memory for several sizes of a network.

Example:
    python examples/python/precision_and_size.py --out build/tutorials

Memory is the most that torch's allocator had allocated at any time: weights, gradients, optimizer
states, activations and scratch tensors. On CUDA that is torch.cuda.max_memory_allocated, on a CPU
the largest total in the profiler's record of all allocations, which lacks what libraries below
torch allocate by themselves.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import digits
import tutorial
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

HIDDEN_LAYERS = 8
BATCH = 8192  # images drawn with repetition
WARM_UP_STEPS = 3
MIB = 2.0**20
MODES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COLOURS = {"fp32": tutorial.GREY, "bf16": tutorial.ORANGE, "fp16": tutorial.BLUE}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one network in one precision needs."""

    width: int
    mode: str
    parameters: int
    step_ms: float
    peak_mib: float


class Training:
    """A network with its optimizer and scaler, and a batch for it."""

    def __init__(self, width: int, mode: str, device: str) -> None:
        """Builds everything from a fixed seed."""
        images, labels, _, _ = tutorial.load_data(device)
        chosen = torch.arange(BATCH, device=device) % len(labels)
        self.images, self.labels = images[chosen], labels[chosen]
        self.device, self.dtype = device, MODES[mode]
        self.model = tutorial.make_network(width, HIDDEN_LAYERS).to(device)
        self.optimizer = FusedAdam(self.model.parameters(), max_grad_norm=1.0)
        # bf16 has the range of fp32 and needs no scaling.
        self.scaler = GradScaler(device, enabled=mode == "fp16")

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, self.dtype, enabled=self.dtype is not None):
            loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def synchronize(device: str) -> None:
    """Waits until the device has done its work, so that a clock can be read."""
    if device == "cuda":
        torch.cuda.synchronize()


def median_ms(step: Callable[[], None], steps: int, device: str) -> float:
    """Median time of a step."""
    for _ in range(WARM_UP_STEPS):
        step()
    times = []
    for _ in range(steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def peak_mib(width: int, mode: str, device: str) -> float:
    """Peak memory of two training steps, with all that was allocated for them."""
    if device == "cuda":
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        training = Training(width, mode, device)
        for _ in range(2):
            training.step()
        return float(torch.cuda.max_memory_allocated() - start) / MIB
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        training = Training(width, mode, device)
        for _ in range(2):
            training.step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    # One event for every allocation and release, with the bytes that are in use after it.
    in_use = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
    return float(max(in_use)) / MIB


def measure(width: int, mode: str, steps: int, device: str) -> Measured:
    """Time and memory of one network in one precision."""
    training = Training(width, mode, device)
    parameters = sum(param.numel() for param in training.model.parameters())
    step_ms = median_ms(training.step, steps, device)
    del training
    return Measured(width, mode, parameters, step_ms, peak_mib(width, mode, device))


def table(results: Sequence[Measured]) -> str:
    """One row for each size and precision, each compared with fp32 of the same size."""
    whole = {result.width: result for result in results if result.mode == "fp32"}
    lines = [
        f"{'width':>6} {'parameters':>11} {'precision':>10} {'time per step':>14} {'fp32 / it':>10}"
        f" {'peak memory':>13} {'of fp32':>8}"
    ]
    for result in results:
        base = whole[result.width]
        lines.append(
            f"{result.width:>6} {result.parameters:>11,} {result.mode:>10}"
            f" {result.step_ms:>11.2f} ms {base.step_ms / result.step_ms:>9.2f}x"
            f" {result.peak_mib:>9.1f} MiB {result.peak_mib / base.peak_mib:>8.0%}"
        )
    return "\n".join(lines)


def chart(path: Path, results: Sequence[Measured], unit: str, what: str) -> None:
    """Grouped bars of time ("ms") or memory ("MiB"), one group for each size."""
    figure, (axes,) = tutorial.new_figure(6.5, 3.8)
    widths = sorted({result.width for result in results})
    for index, mode in enumerate(MODES):
        chosen = [result for result in results if result.mode == mode]
        heights = [result.step_ms if unit == "ms" else result.peak_mib for result in chosen]
        positions = [group + 0.27 * (index - 1) for group in range(len(widths))]
        bars = axes.bar(positions, heights, 0.25, color=COLOURS[mode], label=mode)
        labels = [f"{height:.1f}" if height < 100 else f"{height:.0f}" for height in heights]
        axes.bar_label(bars, labels, fontsize=8, padding=1)
    sizes = {result.width: result.parameters for result in results}
    names = [f"width {width},\n{sizes[width] / 1e3:.0f} k parameters" for width in widths]
    axes.set_xticks(range(len(widths)), names)
    axes.margins(y=0.1)
    axes.set_ylabel(f"{what}, {unit}")
    axes.set_title(f"One training step with {BATCH} images")
    axes.legend(frameon=False, loc="upper left")
    tutorial.save(figure, path)


def device_lines(device: str) -> list[str]:
    """Where this runs, and whether the processor computes in 16 bits."""
    if device == "cuda":
        return [f"device: {torch.cuda.get_device_name()}"]
    lines = [f"device: CPU ({platform.machine()}), {torch.get_num_threads()} threads"]
    return lines + [f"  {mode}: {digits.cpu_support(mode)}" for mode in ("bf16", "fp16")]


def main() -> int:
    """Measures all sizes in all precisions."""
    arguments = tutorial.arguments(__doc__).parse_args()
    widths = (32, 128) if arguments.quick else (64, 128, 256)
    steps = 2 if arguments.quick else 10
    print("\n".join(device_lines(arguments.device)))
    cases = [(width, mode) for width in widths for mode in MODES]
    results = [
        measure(width, mode, steps, arguments.device)
        for width, mode in tqdm(cases, desc="networks", unit="network", leave=False, disable=None)
    ]
    print(table(results))
    chart(arguments.out / "time_per_step.png", results, "ms", "median time")
    chart(arguments.out / "peak_memory.png", results, "MiB", "peak memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
