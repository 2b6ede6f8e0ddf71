# SPDX-License-Identifier: BSD-3-Clause
"""fp32 against mixed precision, over all result files in a folder, of any machine and language.

Example:
    python examples/python/image_report.py build/images

prints one row per device, precision and language, with the median over its runs, and draws two bar
charts, <folder>/report.png: memory in use, and speed as steps per second. Give each run a --name,
and copy the result files of other machines into the folder to compare devices.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import tutorial

MIB = 2.0**20
WARM_UP_STEPS = 5
COLORS = {"fp32": tutorial.GREY, "bf16": tutorial.ORANGE, "fp16": tutorial.BLUE}


def memory_now(device_type: str) -> dict[str, float]:
    """Memory in MiB: what is used, free and there at all.

    Of a GPU what NVML says of the device, of all programs together. Of a CPU the peak of this
    process, without those that load images, and what the system says is available.
    """
    if device_type == "cuda":
        try:
            import pynvml
        except ImportError as error:
            raise SystemExit("expected NVML's package: pip install nvidia-ml-py") from error
        import torch

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return {"used": info.used / MIB, "free": info.free / MIB, "total": info.total / MIB}
    system = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    )
    free, total = (float(system[name].split()[0]) / 1024 for name in ("MemAvailable", "MemTotal"))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"used": used, "free": free, "total": total}


def step_seconds(run: dict[str, Any]) -> float:
    """Median time of a step, without the first ones."""
    seconds: list[float] = run["step_seconds"]
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def curves(result: Path, picture: Path) -> None:
    """Draws the losses of all steps and the accuracies of all epochs of a run."""
    run = json.loads(result.read_text(encoding="utf-8"))
    figure, (left, right) = tutorial.new_figure(8, 3, panels=2)
    left.plot(run["losses"], color=COLORS[run["precision"]], linewidth=1)
    left.set(
        xlabel="step", ylabel="loss", yscale="log", title=f"{run['device']}, {run['precision']}"
    )
    epochs = range(1, len(run["accuracies"]) + 1)
    right.plot(epochs, run["accuracies"], marker="o", color=COLORS[run["precision"]])
    right.set(xlabel="epoch", ylabel="accuracy", title="averaged weights, test images")
    tutorial.save(figure, picture)


Row = tuple[str, str, str]


def rows_of(folder: Path) -> dict[Row, list[dict[str, Any]]]:
    """The runs by device, precision and language."""
    rows: defaultdict[Row, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        if not run["losses"]:
            raise SystemExit(f"expected {file} to hold at least one step, got none")
        rows[run["device"], run["precision"], run["language"]].append(run)
    if not rows:
        raise SystemExit(f"expected result files of train_images in {folder}, got none")
    order = list(COLORS)
    return dict(sorted(rows.items(), key=lambda item: (item[0][0], order.index(item[0][1]), item)))


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the runs of a row."""
    median = statistics.median
    memory = {
        name: median(run["memory_mib"][name] for run in runs) for name in ("used", "free", "total")
    }
    return {
        **memory,
        "steps_per_second": 1 / median(step_seconds(run) for run in runs),
        "accuracy": median(run["accuracies"][-1] for run in runs),
    }


def table(rows: dict[Row, dict[str, float]], runs: dict[Row, int]) -> str:
    """One line per row."""
    lines = [
        f"{'device':24} {'precision':9} {'language':8} {'runs':>4} {'used MiB':>9} {'free':>9} "
        f"{'total':>9} {'1/t':>8} {'accuracy':>8}"
    ]
    for row, values in rows.items():
        device, precision, language = row
        lines.append(
            f"{device[:24]:24} {precision:9} {language:8} {runs[row]:4} {values['used']:9.0f} "
            f"{values['free']:9.0f} {values['total']:9.0f} {values['steps_per_second']:8.2f} "
            f"{values['accuracy']:8.2%}"
        )
    return "\n".join(lines)


def bar_charts(rows: dict[Row, dict[str, float]], picture: Path) -> None:
    """Draws memory and speed, one bar per row."""
    figure, panels = tutorial.new_figure(10, 1.2 + 0.4 * len(rows), panels=2)
    labels = [f"{device}, {precision}, {language}" for device, precision, language in rows]
    colors = [COLORS[precision] for _, precision, _ in rows]
    charts = (("used", "memory in use (MiB)"), ("steps_per_second", "steps per second (1/t)"))
    for panel, (value, title) in zip(panels, charts, strict=True):
        bars = panel.barh(labels, [values[value] for values in rows.values()], color=colors)
        panel.bar_label(bars, fmt="%.4g", padding=3)
        panel.margins(x=0.15)
        panel.invert_yaxis()
        panel.set(title=title)
    panels[1].tick_params(labelleft=False)
    tutorial.save(figure, picture)


def main() -> None:
    """Reads the folder, prints the table and draws the charts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    runs = rows_of(folder)
    rows = {row: summary(of_row) for row, of_row in runs.items()}
    print(table(rows, {row: len(of_row) for row, of_row in runs.items()}))
    bar_charts(rows, folder / "report.png")


if __name__ == "__main__":
    main()
