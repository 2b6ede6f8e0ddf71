# SPDX-License-Identifier: BSD-3-Clause
"""Decides from what a stage left whether it passed, and picks the figures that are kept."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

# DRAM bytes per element that a kernel reads and writes by the algorithm, in fp32; its whole traffic
# may exceed their sum by 5 %. What the L2 still holds at its end is not counted by ncu, so it may
# fall short; below half, the kernel did something else.
BYTE_MODEL: Mapping[str, tuple[int, int]] = {
    "multi_tensor_l2_norm_kernel": (4, 0),
    "multi_tensor_unscale_kernel": (4, 4),
    "fused_update_kernel": (16, 12),
}
BYTES_FLOOR, BYTES_CEILING = 0.5, 1.05
DRAM_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
DURATION_METRIC = "gpu__time_duration.sum"
NAMED_FAILURES = 20

# All that a test may be skipped for where it was asked to run. Nothing that is absent is among it.
MAY_SKIP = re.compile(
    r"needs \d+ CUDA devices|accesses are not counted|needs a machine without (a GPU|CUDA)$|"
    r"gpu_only: the pretended device cannot"
)


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a stage left: exit status, everything it printed, and where its report should be."""

    status: int
    log: str
    report: Path


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why a stage failed, or nothing; its key figure for the summary, and all its figures."""

    reason: str = ""
    key: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Judge = Callable[[Finished], Verdict]


def judge_status(finished: Finished) -> Verdict:
    """The exit status says all."""
    return Verdict(f"exit status {finished.status}" if finished.status else "")


def read_junit(text: str) -> tuple[int, list[str], dict[str, int]]:
    """How many passed, failures, and reasons of skips: of pytest (--junitxml) or GoogleTest."""
    passed, failures, skips = 0, [], Counter[str]()
    for case in ElementTree.fromstring(text).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            words = (case.get("classname"), case.get("name") or "no test by itself")
            failures.append("::".join(filter(None, words)))
        elif skipped is not None:
            why = skipped.get("message") or skipped.text or "no reason"
            skips[" ".join(why.split())] += 1
        elif case.get("status") == "notrun":
            skips["not run"] += 1
        else:
            passed += 1
    return passed, failures, dict(skips)


def judge_tests(finished: Finished) -> Verdict:
    """Some tests passed, none failed, and none was skipped for what is absent here."""
    try:
        passed, failures, skips = read_junit(finished.report.read_text(encoding="utf-8"))
    except (OSError, ElementTree.ParseError) as error:
        return Verdict(f"exit status {finished.status}, report cannot be read: {error}")
    numbers = {"passed": passed, "failed": len(failures), "skipped": sum(skips.values())}
    figures = {**numbers, "failures": failures[:NAMED_FAILURES], "skips": skips}
    key = ", ".join(f"{number:,} {what}" for what, number in numbers.items() if number)
    wrong_skips = {why: count for why, count in skips.items() if not MAY_SKIP.search(why)}
    reason = ""
    if failures:
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        reason = f"{failures[0]}{more} failed"
    elif wrong_skips:
        reason = f"{sum(wrong_skips.values())} skipped that must run: {next(iter(wrong_skips))}"
    elif finished.status:
        reason = f"exit status {finished.status}"
    elif not passed:
        reason = "no test passed"
    return Verdict(reason, key, figures)


_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE)
_COMPLAINT = re.compile(r"^=+ ((?:Error|Internal Sanitizer Error|Fatal)\b.*)$", re.MULTILINE)


def judge_sanitizer(finished: Finished) -> Verdict:
    """No error in the sanitizer's own summaries, and the tests under it passed."""
    tests = judge_tests(finished)
    summaries = _SUMMARY.findall(finished.log)
    if not summaries:
        complaint = _COMPLAINT.search(finished.log)
        words = complaint.group(1).strip() if complaint else "no summary was printed"
        return Verdict(f"{words} (exit status {finished.status})")
    errors = sum(map(int, summaries))
    key = ", ".join(filter(None, [f"{errors} errors", tests.key]))
    figures = {**tests.figures, "errors": errors}
    return Verdict(f"{errors} errors" if errors else tests.reason, key, figures)


def judge_benchmark(finished: Finished) -> Verdict:
    """Contenders verify themselves; every case must have been timed."""
    if finished.status:
        return judge_status(finished)
    cases = json.loads(finished.report.read_text(encoding="utf-8"))["cases"]
    kept = ("seconds", "host", "gb_per_s", "ratios")
    figures = {case["name"]: {key: case[key] for key in kept} for case in cases}
    medians = ((case["name"], own["median"]) for case in cases for own in case["seconds"].values())
    untimed = {name for name, median in medians if not median > 0}
    if untimed or not cases:
        return Verdict(f"no time of {', '.join(sorted(untimed)) or 'any case'}", figures=figures)
    case, reference = cases[0], cases[0]["reference"]
    speeds = [case["gb_per_s"][name] for name in (case["subject"], reference)]
    ours = f"{case['name']} {speeds[0]:.0f} GB/s, {speeds[0] / speeds[1]:.2f}x a {reference}"
    return Verdict("", f"{len(cases)} cases; {ours}", figures)


# The base units of ncu, of which newer ones have the shorter names.
_UNITS = {"byte": 1.0, "nsecond": 1e-9, "ns": 1e-9, "second": 1.0, "s": 1.0}


def read_ncu(text: str, numel: int) -> dict[str, Any]:
    """Per kernel of the model, its launch with the most traffic: bytes per element, and x model.

    Raises:
        ValueError: a unit that is not known, or a value that ncu could not measure.
        KeyError: a column or a metric is not there.
    """
    launches: dict[tuple[str, str], dict[str, float]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if line.startswith('"')):
        name, unit, value = row["Metric Name"], row["Metric Unit"], row["Metric Value"]
        if unit not in _UNITS:
            raise ValueError(f"expected bytes or seconds for {name}, got '{value}' '{unit}'")
        launch = launches.setdefault((row["Kernel Name"], row["ID"]), {})
        launch[name] = float(value.replace(",", "")) * _UNITS[unit]
    figures: dict[str, Any] = {}
    for kernel, model in BYTE_MODEL.items():
        is_named = re.compile(rf"\b{kernel}\b").search
        own = [launch for (name, _), launch in launches.items() if is_named(name)]
        if own:
            read, written = max(tuple(launch[name] for name in DRAM_METRICS) for launch in own)
            figures[kernel] = {
                "read_per_element": read / numel,
                "written_per_element": written / numel,
                "of_model": (read + written) / numel / sum(model),
                "microseconds": max(launch[DURATION_METRIC] for launch in own) * 1e6,
            }
    return figures


def judge_ncu(numel: int, finished: Finished) -> Verdict:
    """Bytes of every kernel of the model are within it; the workload works on `numel` elements."""
    text = finished.report.read_text(encoding="utf-8") if finished.report.is_file() else ""
    error = re.search(r"^==ERROR== (.+)$", f"{text}\n{finished.log}", re.MULTILINE)
    if error:
        return Verdict(f"ncu: {error.group(1).strip()}")
    if finished.status:
        return judge_status(finished)
    try:
        figures = read_ncu(text, numel)
    except (ValueError, KeyError) as problem:
        return Verdict(f"ncu's table cannot be read: {problem}")
    unseen = [kernel for kernel in BYTE_MODEL if kernel not in figures]
    if unseen:
        return Verdict(f"ncu saw no launch of {', '.join(unseen)}", figures=figures)
    ratios = {kernel: figure["of_model"] for kernel, figure in figures.items()}
    key = ", ".join(f"{k.removesuffix('_kernel')} {ratio:.3f}x" for k, ratio in ratios.items())
    outside = [k for k, ratio in ratios.items() if not BYTES_FLOOR <= ratio <= BYTES_CEILING]
    reason = f"bytes of {', '.join(outside)} outside {BYTES_FLOOR} to {BYTES_CEILING}x model"
    return Verdict(reason if outside else "", key, figures)
