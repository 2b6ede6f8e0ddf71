# SPDX-License-Identifier: BSD-3-Clause
"""The log of a language model's training, one JSON object a line, and its curve.

Example:
    python examples/python/sharded_lm_report.py build/sharded/cpp/log.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WARM_UP_STEPS = 3

Record = dict[str, Any]


def read(log: Path) -> list[Record]:
    """The records of a log, in their order. A line that a run died in is none."""
    *lines, _ = log.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


class Log:
    """Writes one record a line. What a run that broke off wrote after its checkpoint goes."""

    def __init__(self, path: Path, begin: int) -> None:
        kept = [r for r in read(path) if r["step"] <= begin] if begin else []
        part = path.with_suffix(".part")  # a run that dies here leaves the log that there was
        self._file = part.open("w", encoding="utf-8", buffering=1)
        for record in kept:
            self.write(record)
        self.sync()
        part.replace(path)

    def write(self, record: Record) -> None:
        """Adds a line, which can be read at once."""
        self._file.write(json.dumps(record) + "\n")

    def sync(self) -> None:
        """Returns once all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def tokens_per_second(records: list[Record]) -> float:
    """Median of the steps after the first ones."""
    rates: list[float] = [record["tokens_per_second"] for record in records if "loss" in record]
    return statistics.median(rates[WARM_UP_STEPS:] or rates)


def draw(log: Path, picture: Path) -> None:
    """Draws the losses over the steps, with a color for each layout of processes in turn."""
    records = read(log)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    steps = [record for record in records if "loss" in record]
    for layout, group in groupby(steps, key=lambda record: record["layout"]):
        part = list(group)
        label = f"training, {layout}: {tokens_per_second(part):,.0f} tokens/s"
        axes.plot([r["step"] for r in part], [r["loss"] for r in part], linewidth=1, label=label)
    tested = [record for record in records if "validation_loss" in record]
    axes.plot(
        [record["step"] for record in tested],
        [record["validation_loss"] for record in tested],
        color="black",
        marker="o",
        markersize=4,
        label="validation",
    )
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend(frameon=False)
    figure.savefig(picture)
    plt.close(figure)


def summary(log: Path) -> str:
    """How the training went, in a sentence for each layout of processes in turn."""
    records = read(log)
    tested = [record for record in records if "validation_loss" in record]
    lines = [
        f"{layout}: {tokens_per_second(list(group)):,.0f} tokens per second"
        for layout, group in groupby(
            (record for record in records if "loss" in record), key=lambda record: record["layout"]
        )
    ]
    first, last = tested[0], tested[-1]
    lines.append(
        f"validation loss: {first['validation_loss']:.4f} before step {first['step'] + 1}, "
        f"{last['validation_loss']:.4f} after step {last['step']}, in {log}"
    )
    return "\n".join(lines)


def main() -> None:
    """Draws the curve of a log that either language's program wrote, beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    log: Path = parser.parse_args().log
    draw(log, log.with_name("loss.svg"))
    print(summary(log))


if __name__ == "__main__":
    main()
