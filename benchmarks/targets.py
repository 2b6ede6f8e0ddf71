# SPDX-License-Identifier: BSD-3-Clause
"""The CPU's targets of docs/performance.md: wanted, before, after, and the memory's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import figures
import result_file
import thread_gain
from contender_table import reference
from page_tables import Maker, Result, table


class Target(NamedTuple):
    """How many times as long as ours `peer` shall take, in the cases whose names begin so."""

    what: str
    case: str
    peer: str
    wanted: float


#: What a time before and one after must have in common.
MACHINE = ("cpu", "cpu_isa", "threads", "torch")
FUSED = "torch fused"
TARGETS = (
    Target("Adam, fp32, one tensor", "step/large", FUSED, 1.0),
    Target("Adam, fp32, ResNet-50", "step/resnet50", FUSED, 1.0),
    Target("Adam, fp32, unscaling and clipping, one tensor", "scale_clip_step/large", FUSED, 1.8),
    Target("the same, ResNet-50", "scale_clip_step/resnet50", FUSED, 1.8),
    Target("Adam, all bf16, one tensor", "bf16_step/large", FUSED, 1.6),
    Target("the same, ResNet-50", "bf16_step/resnet50", FUSED, 1.6),
    Target("norm and check, one tensor", "norm_and_check/large", "get_total_norm", 2.1),
    Target("Adam, fp32, 10,000 tensors of 64", "step/tiny_10000x64", FUSED, 12.0),
    Target("the same, unscaling and clipping", "scale_clip_step/tiny_10000x64", FUSED, 20.0),
    Target("Adam, fp32, denormal moments", "step/stale_rows", "torch default", 10.0),
)


class Measured(NamedTuple):
    """A target's ratio in a file, and our speed there as a share of the stream's."""

    ratio: float
    gb_per_s: float
    share: float


def _measured(result: Result, target: Target) -> Measured | None:
    for case in result.get("cases", []):
        if case["name"] == target.case and target.peer in case["ratios"]:
            rate = case["gb_per_s"][case["subject"]]
            stream = case["gb_per_s"][reference(case)]
            return Measured(result_file.ratio(case, target.peer), rate, rate / stream)
    return None


def _verdict(ratios: Sequence[float], wanted: float) -> str:
    """Whether the target was met; in how many files, if not in all or none."""
    reached = sum(ratio >= wanted for ratio in ratios)
    if 0 < reached < len(ratios):
        return f"met in {reached} of {len(ratios)}"
    return "met" if reached else "missed"


def _row(target: Target, found: Sequence[Measured]) -> list[str]:
    """The first file is before; all others are after, with the smallest and the largest figure."""
    after = found[1:] or found
    ratios = [one.ratio for one in after]
    return [
        target.what,
        f"`{target.case}`",
        target.peer,
        f"≥ {target.wanted:g}",
        figures.as_text([found[0].ratio]) if len(found) > 1 else "",
        figures.as_text(ratios),
        figures.as_text([one.gb_per_s for one in after], digits=1),
        figures.as_text([100 * one.share for one in after], digits=0) + " %",
        _verdict(ratios, target.wanted),
    ]


def cpu_targets(results: Sequence[dict[str, Any]]) -> str:
    """A row for each target: the first file that has it is before, the others are after.

    Raises:
        ValueError: no file has a target's case, or the files are not of one machine and torch.
    """
    rows = []
    for key in MACHINE:
        values = dict.fromkeys(str(result["environment"][key]) for result in results)
        if len(values) > 1:
            raise ValueError(f"expected files with the same {key}, got {' and '.join(values)}.")
    for result in results[1:]:
        other_cores = thread_gain.refusal(results[0], result)
        if other_cores is not None:
            raise ValueError(other_cores)
    for target in TARGETS:
        found = [one for result in results if (one := _measured(result, target)) is not None]
        if not found:
            raise ValueError(f"expected a result file with {target.case} and {target.peer}.")
        rows.append(_row(target, found))
    head = ["target", "row", "against", "wanted", "before", "after", "GB/s", "of the stream", ""]
    return table(head, rows, range(3, 8))


TABLES: dict[str, Maker] = {"cpu-targets": cpu_targets}
