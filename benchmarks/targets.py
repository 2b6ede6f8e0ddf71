# SPDX-License-Identifier: BSD-3-Clause
"""The CPU's targets of docs/performance.md: wanted, before, after, and the memory's limit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import comparable
import figures
import result_file
import thread_gain
from contender_table import reference
from page_tables import Maker, Result, table


class Target(NamedTuple):
    """What the cases of a suite whose names begin with `case` shall reach.

    That is `wanted` times our time for `peer`; without a peer, `wanted` per cent of the stream.
    """

    what: str
    case: str
    peer: str | None
    wanted: float
    suite: str = "fused_adam"


#: What a time before and one after must have in common.
MACHINE = ("cpu", "cpu_isa", "threads", "torch", *comparable.LATER)
FUSED = "torch fused"
FOREACH = "torch foreach"
DEEPSPEED = "DeepSpeed"
STEP = "step with its check"
#: The scaler may add 5 % to a step, and 10 % to one that is short.
WITH_SCALER, WITH_SCALER_SHORT = 1 / 1.05, 1 / 1.1
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
    Target("Adam, fp32, one tensor", "adam/step/large", DEEPSPEED, 1.0, "peers"),
    Target("Adagrad, the same", "adagrad/step/large", DEEPSPEED, 1.0, "peers"),
    Target("Lion, the same", "lion/step/large", DEEPSPEED, 1.0, "peers"),
    Target(
        "Adam, fp32, unscaling and clipping, one tensor",
        "fp32/s3/large",
        "torch compiled, static scale",
        1.0,
        "scenarios",
    ),
    Target("the same in bf16 with fp32 masters, all shapes", "masters/s3", FUSED, 1.8, "scenarios"),
    Target("SGD with momentum, fp32", "sgd/step", FUSED, 0.98, "optimizers"),
    Target("LAMB, fp32", "lamb/step", FOREACH, 2.5, "optimizers"),
    Target("LAMB, fp32, its bytes", "lamb/step", None, 90, "optimizers"),
    Target(
        "scaler's step and update, 400 tensors of 16,384",
        "step_update_against_step/tensors_400",
        STEP,
        WITH_SCALER,
        "grad_scaler",
    ),
    Target(
        "the same, 400 tensors of 256",
        "step_update_against_step/tiny_400",
        STEP,
        WITH_SCALER_SHORT,
        "grad_scaler",
    ),
    Target(
        "400 DTensors of 16,384, clipping", "dtensor_clip_step/tensors_400", FUSED, 10.0, "dtensor"
    ),
    Target("400 DTensors of 256, clipping", "dtensor_clip_step/tiny_400", FUSED, 10.0, "dtensor"),
    Target("batch normalization", "forward_backward", "torch", 2.0, "sync_batch_norm"),
)


class Measured(NamedTuple):
    """A case of a file: the peer's time over ours, and our speed there beside the stream's."""

    ratio: float | None
    gb_per_s: float
    per_cent: float

    def reaches(self, wanted: float) -> bool:
        """Whether this is what the target asks for."""
        return (self.per_cent if self.ratio is None else self.ratio) >= wanted


def _measured(result: Result, target: Target) -> list[Measured]:
    found: list[Measured] = []
    for case in result["cases"]:
        named = f"{case['name']}/".startswith(f"{target.case}/")
        if named and (target.peer is None or target.peer in case["ratios"]):
            ratio = None if target.peer is None else result_file.ratio(case, target.peer)
            rate = case["gb_per_s"][case["subject"]]
            found.append(Measured(ratio, rate, 100 * rate / case["gb_per_s"][reference(case)]))
    return found


def _is_about(result: Result, target: Target) -> bool:
    """Whether it is of the target's suite, and of its kind: a suite may have two files."""
    kind = target.case.split("/")[0]
    return result.get("suite") == target.suite and any(
        case["name"].split("/")[0] == kind for case in result["cases"]
    )


def _verdict(found: Sequence[Measured], wanted: float, lacking: int, files: int) -> str:
    """Whether the target was met; how often, if neither always nor never; files without it."""
    reached = sum(one.reaches(wanted) for one in found)
    verdict = "met" if reached else "missed"
    if 0 < reached < len(found):
        verdict = f"met in {reached} of {len(found)}"
    return f"{verdict}, not measured in {lacking} of {files}" if lacking else verdict


def _ratios(found: Sequence[Measured]) -> str:
    ratios = [one.ratio for one in found if one.ratio is not None]
    return figures.as_text(ratios) if ratios else ""


def _row(target: Target, results: Sequence[Result]) -> list[str]:
    """The first file is before; all others are after, with the smallest and the largest figure.

    Raises:
        ValueError: no file after has the target's case.
    """
    earlier, later = (results[:1], results[1:]) if len(results) > 1 else ((), results)
    before = [one for file in earlier if _is_about(file, target) for one in _measured(file, target)]
    files = [_measured(file, target) for file in later if _is_about(file, target)]
    after = [one for found in files for one in found]
    if not after:
        peer = "" if target.peer is None else f" and {target.peer}"
        where = "a later result file" if earlier else "a result file"
        raise ValueError(f"expected {where} of {target.suite} with {target.case}{peer}.")
    lacking = sum(not found for found in files)
    wanted = f"{target.wanted:g} %" if target.peer is None else f"{target.wanted:.3g}"
    return [
        target.what,
        f"`{target.case}`",
        target.peer or "the stream",
        f"≥ {wanted}",
        _ratios(before),
        _ratios(after),
        figures.as_text([one.gb_per_s for one in after], digits=1),
        figures.as_text([one.per_cent for one in after], digits=0) + " %",
        _verdict(after, target.wanted, lacking, len(files)),
    ]


def cpu_targets(results: Sequence[dict[str, Any]]) -> str:
    """A row for each target: the first file is before, the others are after; a single one is after.

    Raises:
        ValueError: no file after has a target's case, or two files are not of one machine and
            torch, or of threads that do and wait alike.
    """
    for key in MACHINE:
        environments = [result["environment"] for result in results]
        said = [one[key] for one in environments if key not in comparable.LATER or key in one]
        values = dict.fromkeys(map(str, said))
        if len(values) > 1:
            raise ValueError(f"expected files with the same {key}, got {' and '.join(values)}.")
    # The first one may not say what its threads did.
    for one, other in itertools.combinations(results, 2):
        other_cores = thread_gain.refusal(one, other)
        if other_cores is not None:
            raise ValueError(other_cores)
    rows = [_row(target, results) for target in TARGETS]
    head = ["target", "row", "against", "wanted", "before", "after", "GB/s", "of the stream", ""]
    return table(head, rows, range(3, 8))


TABLES: dict[str, Maker] = {"cpu-targets": cpu_targets}
