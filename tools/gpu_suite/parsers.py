# SPDX-License-Identifier: BSD-3-Clause
"""Reads what the tools leave behind: test reports, the sanitizers' summaries and ncu's table."""

from __future__ import annotations

import collections
import csv
import dataclasses
import re
from typing import Any
from xml.etree import ElementTree

# Reasons of the skips that a machine with a GPU must not have.
WANT_OF_GPU = re.compile(r"needs a (CUDA device|GPU)")


@dataclasses.dataclass
class TestCounts:
    """How many tests passed; which failed; why some were skipped."""

    __test__ = False  # pytest collects classes by such names

    passed: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    skips: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def skipped(self) -> int:
        """Number of skipped tests."""
        return sum(self.skips.values())

    @property
    def skipped_for_want_of_gpu(self) -> int:
        """Number of skipped tests whose reason is that there is no GPU."""
        return sum(count for reason, count in self.skips.items() if WANT_OF_GPU.search(reason))

    def skip(self, reason: str) -> None:
        """Counts one skipped test."""
        reason = " ".join(reason.split()) or "no reason given"
        self.skips[reason] = self.skips.get(reason, 0) + 1

    def as_dict(self) -> dict[str, int]:
        """For the result file."""
        return {"passed": self.passed, "failed": len(self.failures), "skipped": self.skipped}


def junit(text: str) -> TestCounts:
    """A report of pytest (--junit-xml), ctest (--output-junit) or GoogleTest (xml)."""
    counts = TestCounts()
    for case in ElementTree.fromstring(text).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            classname, name = case.get("classname", ""), case.get("name") or "no test by itself"
            counts.failures.append(name if classname in ("", name) else f"{classname}::{name}")
        elif skipped is not None:
            counts.skip(skipped.get("message") or skipped.text or "")
        elif case.get("status") == "notrun":
            counts.skip("not run")
        else:
            counts.passed += 1
    return counts


def listed_gtests(text: str) -> int:
    """Number of tests that --gtest_list_tests prints: the indented lines."""
    return sum(line.startswith("  ") for line in text.splitlines())


def listed_pytests(text: str) -> int:
    """Number of tests that --collect-only -q prints: one node per line."""
    return len(re.findall(r"^\S+\.py::", text, re.MULTILINE))


_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE)
_COMPLAINT = re.compile(r"^=+ ((?:Error|Internal Sanitizer Error|Fatal)\b.*)$", re.MULTILINE)


def sanitizer_errors(log: str) -> int | None:
    """Errors and hazards of all of compute-sanitizer's summaries; None if it printed none."""
    found = _SUMMARY.findall(log)
    return sum(int(count) for count in found) if found else None


def sanitizer_complaint(log: str) -> str:
    """What compute-sanitizer said about itself, or nothing."""
    match = _COMPLAINT.search(log)
    return match.group(1).strip() if match else ""


_BYTES = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}
_SECONDS = {"second": 1.0, "msecond": 1e-3, "usecond": 1e-6, "nsecond": 1e-9}
_SECONDS |= {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_UNITS: dict[str, float] = {**_BYTES, **_SECONDS}


def ncu(text: str) -> list[dict[str, Any]]:
    """Launches in ncu's CSV: `kernel` (its name alone) and each metric in bytes or seconds.

    Raises:
        ValueError: a unit that is not known, or a value that ncu could not measure.
    """
    table = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, Any]] = collections.OrderedDict()
    for row in csv.DictReader(table):
        name, unit, value = row["Metric Name"], row["Metric Unit"], row["Metric Value"]
        if unit not in _UNITS:
            raise ValueError(f"ncu: expected bytes or seconds for {name}, got '{value}' '{unit}'")
        match = re.search(r"(\w+)\s*(?:<|\(|$)", row["Kernel Name"].removeprefix("void "))
        kernel = match.group(1) if match else row["Kernel Name"]
        launch = launches.setdefault(row["ID"], {"kernel": kernel})
        launch[name] = float(value.replace(",", "")) * _UNITS[unit]
    return list(launches.values())


def ncu_error(text: str) -> str:
    """Ncu's first complaint, or nothing."""
    match = re.search(r"^==ERROR== (.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""
