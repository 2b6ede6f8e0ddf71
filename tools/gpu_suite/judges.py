# SPDX-License-Identifier: BSD-3-Clause
"""Decides from what a stage left whether it passed, and picks the figures that are kept."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

from gpu_suite import parsers
from gpu_suite.model import (
    FAILED,
    NEEDS_A_GPU,
    NOT_RUN,
    PASSED,
    Finished,
    Judge,
    Verdict,
    judge_status,
)

# DRAM bytes per element that a kernel reads and writes by the algorithm, in fp32; its whole traffic
# may exceed their sum by 5 %. What the L2 still holds at its end is not counted by ncu, so it may
# fall short; below half, the kernel did something else.
BYTE_MODEL: Mapping[str, tuple[int, int]] = {
    "multi_tensor_l2_norm_kernel": (4, 0),
    "multi_tensor_unscale_kernel": (4, 4),
    "fused_update_kernel": (16, 12),
}
BYTES_CEILING = 1.05
BYTES_FLOOR = 0.5
DRAM_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
DURATION_METRIC = "gpu__time_duration.sum"
NAMED_FAILURES = 20


def _read_counts(report: Path) -> parsers.TestCounts:
    if not report.is_file():
        raise ValueError(f"no report was written to {report.name}")
    try:
        return parsers.junit(report.read_text(encoding="utf-8"))
    except ParseError as error:
        raise ValueError(f"{report.name} is no whole report: {error}") from error


def judge_tests(
    report: Path,
    on_gpu: bool,
    may_skip: bool = True,
    may_be_empty: bool = False,
) -> Judge:
    """Judges a test report; a run in which no test passed has proven nothing and fails.

    Args:
        report: where the runner writes it, as JUnit's XML.
        on_gpu: skips for want of a GPU are failures.
        may_skip: otherwise every skip is a failure.
        may_be_empty: a run without a GPU in which all tests were skipped counts as not run.
    """

    def judge(finished: Finished) -> Verdict:
        try:
            counts = _read_counts(report)
        except ValueError as error:
            return Verdict(FAILED, f"exit status {finished.status}, {error}")
        verdict = functools.partial(
            Verdict,
            key=", ".join(f"{n:,} {what}" for what, n in counts.as_dict().items() if n),
            counts=counts.as_dict(),
            figures={"skips": counts.skips, "failures": counts.failures[:NAMED_FAILURES]},
        )
        wrong_skips = 0
        if not may_skip:
            wrong_skips = counts.skipped
        elif on_gpu:
            wrong_skips = counts.skipped_for_want_of_gpu
        if counts.failures:
            first = counts.failures[0]
            more = f" and {len(counts.failures) - 1} more" if len(counts.failures) > 1 else ""
            return verdict(FAILED, f"{first}{more} failed")
        if wrong_skips:
            return verdict(FAILED, f"{wrong_skips} tests were skipped that must run here")
        if may_be_empty and counts.passed == 0 and counts.skipped:
            return verdict(NOT_RUN, NEEDS_A_GPU, required=False)
        if finished.status != 0:
            return verdict(FAILED, f"exit status {finished.status}")
        if counts.passed == 0:
            return verdict(FAILED, "no test passed")
        return verdict(PASSED)

    return judge


def judge_sanitizer(report: Path) -> Judge:
    """No error in the sanitizer's own summary, and the tests under it passed."""
    judge_report = judge_tests(report, on_gpu=True)

    def judge(finished: Finished) -> Verdict:
        tests = judge_report(finished)
        errors = parsers.sanitizer_errors(finished.log)
        counts = {**tests.counts, "errors": errors or 0}
        if errors is None:
            complaint = parsers.sanitizer_complaint(finished.log) or "no summary was printed"
            return Verdict(FAILED, f"{complaint} (exit status {finished.status})", counts=counts)
        key = f"{errors} errors, {tests.key}" if tests.key else f"{errors} errors"
        if errors:
            return Verdict(FAILED, f"{errors} errors", key, counts, tests.figures)
        return Verdict(tests.status, tests.reason, key, counts, tests.figures)

    return judge


def judge_benchmark(result: Path) -> Judge:
    """The benchmark verifies its contenders itself; the result must hold cases."""

    def judge(finished: Finished) -> Verdict:
        if finished.status != 0:
            return judge_status(finished)
        cases = json.loads(result.read_text(encoding="utf-8"))["cases"]
        if not cases:
            return Verdict(FAILED, "the result holds no case")
        figures: dict[str, Any] = {}
        for case in cases:
            ratios = {peer: ratio["of_medians"] for peer, ratio in case["ratios"].items()}
            figures[case["name"]] = {
                "gb_per_s": case["gb_per_s"][case["subject"]],
                "ratios": ratios,
            }
        key = ""
        for name in ("scale_clip_step/resnet50", *figures):
            if name in figures:
                peer, ratio = next(iter(figures[name]["ratios"].items()))
                gb_per_s = figures[name]["gb_per_s"]
                key = f"{len(cases)} cases; {name} {ratio:.2f}x {peer}, {gb_per_s:.0f} GB/s"
                break
        return Verdict(PASSED, key=key, counts={"cases": len(cases)}, figures=figures)

    return judge


def compare_with_byte_model(launches: list[dict[str, Any]], numel: int) -> dict[str, Any]:
    """Per kernel of the model, the launch with the most traffic: bytes per element, and x model."""
    figures: dict[str, Any] = {}
    for kernel, (model_read, model_written) in BYTE_MODEL.items():
        own = [launch for launch in launches if launch["kernel"] == kernel]
        if not own:
            continue
        read, written = max(tuple(launch[name] for name in DRAM_METRICS) for launch in own)
        figures[kernel] = {
            "read_per_element": read / numel,
            "written_per_element": written / numel,
            "of_model": (read + written) / numel / (model_read + model_written),
            "microseconds": max(launch[DURATION_METRIC] for launch in own) * 1e6,
        }
    return figures


def judge_ncu(table: Path, numel: int) -> Judge:
    """Bytes within the model, or the reason why ncu cannot say; its absence is no failure."""

    def judge(finished: Finished) -> Verdict:
        if finished.status != 0:
            return Verdict(FAILED, f"the workload itself failed: exit status {finished.status}")
        text = table.read_text(encoding="utf-8") if table.is_file() else ""
        error = parsers.ncu_error(text) or parsers.ncu_error(finished.log)
        if "application returned an error" in error:
            return Verdict(FAILED, f"under ncu: {error}")
        if error:
            return Verdict(NOT_RUN, f"ncu does not work here: {error}", required=False)
        try:
            figures = compare_with_byte_model(parsers.ncu(text), numel)
        except (ValueError, KeyError) as problem:
            return Verdict(FAILED, f"ncu's table cannot be read: {problem}")
        unseen = [kernel for kernel in BYTE_MODEL if kernel not in figures]
        if unseen:
            return Verdict(FAILED, f"ncu saw no launch of {', '.join(unseen)}", figures=figures)
        ratios = {kernel: figure["of_model"] for kernel, figure in figures.items()}
        key = ", ".join(
            f"{kernel.removesuffix('_kernel')} {ratio:.3f}x" for kernel, ratio in ratios.items()
        )
        outside = [k for k, ratio in ratios.items() if not BYTES_FLOOR <= ratio <= BYTES_CEILING]
        if outside:
            reason = (
                f"bytes of {', '.join(outside)} outside {BYTES_FLOOR} to {BYTES_CEILING}x model"
            )
            return Verdict(FAILED, reason, key, figures=figures)
        return Verdict(PASSED, key=key, figures=figures)

    return judge


def rehearsal(judge: Judge) -> Judge:
    """For what runs in place of a stage that needs a GPU: it can fail, but not pass."""

    def rehearsed(finished: Finished) -> Verdict:
        verdict = judge(finished)
        if verdict.status != PASSED:
            return verdict
        return Verdict(
            NOT_RUN, NEEDS_A_GPU, verdict.key, verdict.counts, verdict.figures, required=False
        )

    return rehearsed


def judge_listing(unit: str, count: Callable[[str], int]) -> Judge:
    """A listing of tests must not be empty."""

    def judge(finished: Finished) -> Verdict:
        listed = count(finished.log)
        if finished.status != 0 or listed == 0:
            return Verdict(FAILED, f"{listed} {unit}, exit status {finished.status}")
        return Verdict(PASSED, key=f"{listed:,} {unit}", counts={"listed": listed})

    return judge
