# SPDX-License-Identifier: BSD-3-Clause
"""Table and charts of the handwritten-digits example."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from digits import Result


def label(result: Result) -> str:
    """Name of a mode in the table and the charts."""
    return result.mode if result.mode == "fp32" else f"mixed {result.mode}"


def table(results: Sequence[Result]) -> str:
    """Compares the modes, one row each."""
    lines = [
        f"{'precision':<12} {'time/step (median)':>20} {'peak memory':>14} {'test accuracy':>15}"
        f" {'skipped steps':>14}"
    ]
    lines += [
        f"{label(result):<12} {result.step_ms:>17.2f} ms {result.peak_mib:>10.1f} MiB"
        f" {100 * result.accuracy:>13.2f} % {result.skipped_steps:>14d}"
        for result in results
    ]
    return "\n".join(lines)


def _bar_chart(path: Path, results: Sequence[Result], heights: list[float], unit: str) -> None:
    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    bars = axes.bar([label(result) for result in results], heights, color="#4878a8")
    axes.bar_label(bars, fmt="%.2f")
    axes.margins(y=0.15)
    axes.set_ylabel(unit)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _loss_scale_chart(path: Path, results: Sequence[Result]) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for result in results:
        axes.step(
            range(len(result.loss_scales)), result.loss_scales, where="post", label=label(result)
        )
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes the charts and the loss-scale history; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [
        folder / name
        for name in ("time_per_step.png", "peak_memory.png", "loss_scale.png", "loss_scale.csv")
    ]
    _bar_chart(paths[0], results, [result.step_ms for result in results], "time per step, ms")
    _bar_chart(paths[1], results, [result.peak_mib for result in results], "peak memory, MiB")

    scaled = [result for result in results if result.loss_scales]
    _loss_scale_chart(paths[2], scaled)
    with paths[3].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(result.mode for result in scaled)])
        writer.writerows(
            [step, *scales]
            for step, scales in enumerate(
                zip_longest(*(result.loss_scales for result in scaled), fillvalue=""), start=1
            )
        )
    return paths
