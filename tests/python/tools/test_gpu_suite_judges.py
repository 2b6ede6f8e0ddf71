# SPDX-License-Identifier: BSD-3-Clause
"""The GPU suite reads what its tools print, and lets nothing pass that proves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_suite import judges, parsers
from gpu_suite.model import FAILED, NOT_RUN, PASSED, Finished, Verdict

PYTEST = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="3" tests="6">
<testcase classname="amp.test_a" name="test_good[cuda]" time="0.1" />
<testcase classname="amp.test_a" name="test_bad[cuda]"><failure message="no"/></testcase>
<testcase classname="amp.test_a" name="test_setup"><error message="no"/></testcase>
<testcase classname="t" name="s1"><skipped type="pytest.skip" message="one processor"/></testcase>
<testcase classname="t" name="s2"><skipped type="pytest.skip" message="one processor"/></testcase>
<testcase classname="t" name="s3"><skipped message="needs a CUDA device and more"/></testcase>
</testsuite></testsuites>
"""
CTEST = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="Linux-c++" tests="3" failures="1" disabled="0" skipped="1">
<testcase name="Adam.Update" classname="Adam.Update" status="run"><system-out/></testcase>
<testcase name="Norm.Empty" classname="Norm.Empty" status="fail"><failure message="no"/></testcase>
<testcase name="Norm.Device" classname="Norm.Device" status="notrun">
<skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/></testcase>
</testsuite>
"""


def gtest_report(*tests: tuple[str, str, bool]) -> str:
    """What GoogleTest writes about tests of (name, result, failed)."""
    inside = {"skipped": '<skipped message="needs a GPU"/>'}
    cases = "".join(
        f'<testcase name="{name}" status="{"notrun" if result == "suppressed" else "run"}" '
        f'result="{result}" classname="Norm">'
        f"{'<failure/>' if failed else inside.get(result, '')}</testcase>"
        for name, result, failed in tests
    )
    return f'<testsuites name="AllTests"><testsuite name="Norm">{cases}</testsuite></testsuites>'


GOOD = gtest_report(("Small", "completed", False), ("Large", "completed", False))


def test_reports_of_pytest_are_counted() -> None:
    counts = parsers.junit(PYTEST)
    assert counts.as_dict() == {"passed": 1, "failed": 2, "skipped": 3}
    assert counts.failures[0] == "amp.test_a::test_bad[cuda]"
    assert counts.skips["one processor"] == 2
    assert counts.skipped_for_want_of_gpu == 1


def test_reports_of_ctest_are_counted() -> None:
    counts = parsers.junit(CTEST)
    assert counts.as_dict() == {"passed": 1, "failed": 1, "skipped": 1}
    assert counts.failures == ["Norm.Empty"]


def test_reports_of_googletest_are_counted() -> None:
    report = gtest_report(
        ("A", "completed", False),
        ("B", "completed", True),
        ("C", "skipped", False),
        ("D", "suppressed", False),
    )
    counts = parsers.junit(report)
    assert counts.as_dict() == {"passed": 1, "failed": 1, "skipped": 2}
    assert counts.failures == ["Norm::B"]
    assert counts.skips == {"needs a GPU": 1, "not run": 1}
    # What fails before the first test has no name.
    assert parsers.junit('<a><testcase name=""><failure/></testcase></a>').failures != [""]


def test_listings_are_counted() -> None:
    listing = (
        "Running main() from gtest_main.cc\nNormSmall.\n  One\n  Two\nAdamSmall/0.  # T\n  One\n"
    )
    assert parsers.listed_gtests(listing) == 3
    assert parsers.listed_gtests("Running main() from gtest_main.cc\n") == 0
    assert parsers.listed_pytests("$ python\ntests/a.py::b[x]\ntests/a.py::c\n\n2 tests\n") == 2


@pytest.fixture
def verdict_of(tmp_path: Path) -> Callable[..., Verdict]:
    """Judges a GoogleTest report, or the lack of one, with options of judge_tests."""

    def judge(report: str | None, status: int = 0, **options: Any) -> Verdict:
        path = tmp_path / "report.xml"
        if report is not None:
            path.write_text(report)
        options = {"on_gpu": True, **options}
        return judges.judge_tests(path, **options)(Finished(status, ""))

    return judge


def test_tests_pass_only_if_some_passed_and_none_failed(
    verdict_of: Callable[..., Verdict],
) -> None:
    skipped = gtest_report(("A", "completed", False), ("B", "skipped", False))
    assert verdict_of(None, 139).reason == "exit status 139, no report was written to report.xml"
    assert verdict_of(GOOD).status == PASSED
    assert verdict_of(GOOD).key == "2 passed"
    assert verdict_of(GOOD, 1).reason == "exit status 1"
    assert verdict_of(GOOD[:40]).status == FAILED
    assert verdict_of(gtest_report()).reason == "no test passed"
    assert verdict_of(gtest_report(("B", "completed", True))).reason == "Norm::B failed"
    assert verdict_of(skipped).reason == "1 tests were skipped that must run here"
    assert verdict_of(skipped, on_gpu=False).status == PASSED
    assert verdict_of(skipped, on_gpu=False, may_skip=False).status == FAILED


def test_a_file_of_gpu_tests_alone_is_not_run_without_a_gpu(
    verdict_of: Callable[..., Verdict],
) -> None:
    all_skipped = gtest_report(("B", "skipped", False))
    verdict = verdict_of(all_skipped, on_gpu=False, may_be_empty=True)
    assert (verdict.status, verdict.reason, verdict.acceptable) == (NOT_RUN, "needs a GPU", True)
    assert verdict_of(gtest_report(), 5, on_gpu=False, may_be_empty=True).status == FAILED


# --- compute-sanitizer ---------------------------------------------------------------------------

MEMCHECK = """========= COMPUTE-SANITIZER
[==========] Running 2 tests from 1 test suite.
========= Invalid __global__ read of size 16 bytes
=========     at multi_tensor_l2_norm_kernel<float>(NormLaunch)+0x90
========= ERROR SUMMARY: {}
"""
RACECHECK = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: {}\n"
NO_DEVICE = "========= COMPUTE-SANITIZER\n========= Error: Device not supported\n"


@pytest.mark.parametrize(
    ("log", "status", "expected", "reason"),
    [
        (MEMCHECK.format("0 errors"), 0, PASSED, ""),
        (MEMCHECK.format("1 error"), 1, FAILED, "1 errors"),
        (RACECHECK.format("0 hazards displayed (0 errors, 0 warnings)"), 0, PASSED, ""),
        (RACECHECK.format("3 hazards displayed (2 errors, 1 warning)"), 1, FAILED, "3 errors"),
        (NO_DEVICE, 1, FAILED, "Error: Device not supported (exit status 1)"),
        ("no such tool", 0, FAILED, "no summary was printed (exit status 0)"),
        (MEMCHECK.format("0 errors"), 1, FAILED, "exit status 1"),
    ],
)
def test_sanitizer(log: str, status: int, expected: str, reason: str, tmp_path: Path) -> None:
    report = tmp_path / "memcheck.xml"
    report.write_text(GOOD)
    verdict = judges.judge_sanitizer(report)(Finished(status, log))
    assert (verdict.status, verdict.reason) == (expected, reason)


def test_a_sanitizer_that_saw_no_test_has_proven_nothing(tmp_path: Path) -> None:
    report = tmp_path / "memcheck.xml"
    report.write_text(gtest_report())
    verdict = judges.judge_sanitizer(report)(Finished(0, MEMCHECK.format("0 errors")))
    assert (verdict.status, verdict.reason) == (FAILED, "no test passed")


# --- ncu -----------------------------------------------------------------------------------------

NUMEL = 2**26
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
NAMES = {
    "multi_tensor_l2_norm_kernel": "void torchfuse::cuda::<unnamed>::{}<float>(NormLaunch)",
    "multi_tensor_unscale_kernel": "torchfuse::(anonymous namespace)::{}<float>(UnscaleLaunch)",
    "fused_update_kernel": "void torchfuse::cuda::{}<UpdateTypes<Adam, (DType)0>, (bool)1>(X)",
}


def ncu_table(factor: float = 1.0, only: tuple[str, ...] = tuple(NAMES)) -> str:
    """What ncu --csv --print-units base writes, with a share of the model's bytes."""
    lines = ["==PROF== Connected to process 123 (/usr/bin/python3.12)", HEADER]
    for index, kernel in enumerate(only):
        read, written = judges.BYTE_MODEL[kernel]
        values = {
            "dram__bytes_read.sum": ("byte", f"{read * NUMEL * factor:,.0f}"),
            "dram__bytes_write.sum": ("byte", f"{written * NUMEL * factor:,.0f}"),
            "gpu__time_duration.sum": ("ns", "91,040"),
        }
        for metric, (unit, value) in values.items():
            cells = [
                str(index),
                "123",
                "python3.12",
                "127.0.0.1",
                NAMES[kernel].format(kernel),
                "1",
            ]
            cells += [
                "7",
                "(256, 1, 1)",
                "(4096, 1, 1)",
                "0",
                "9.0",
                "Command line profiler metrics",
            ]
            lines.append(",".join(f'"{cell}"' for cell in [*cells, metric, unit, value]))
    return "\n".join([*lines, "==PROF== Disconnected from process 123"])


def judge_ncu(tmp_path: Path, table: str, status: int = 0, log: str = "") -> Verdict:
    path = tmp_path / "ncu.csv"
    path.write_text(table)
    return judges.judge_ncu(path, NUMEL)(Finished(status, log))


def test_bytes_of_the_model_pass(tmp_path: Path) -> None:
    verdict = judge_ncu(tmp_path, ncu_table(1.02))
    assert verdict.status == PASSED
    figure = verdict.figures["fused_update_kernel"]
    assert figure["read_per_element"] == pytest.approx(16.32)
    assert figure["written_per_element"] == pytest.approx(12.24)
    assert figure["of_model"] == pytest.approx(1.02)
    assert figure["microseconds"] == pytest.approx(91.04)
    assert "multi_tensor_l2_norm 1.020x" in verdict.key


@pytest.mark.parametrize("factor", [1.06, 0.4])
def test_bytes_outside_the_model_fail(factor: float, tmp_path: Path) -> None:
    verdict = judge_ncu(tmp_path, ncu_table(factor))
    assert verdict.status == FAILED
    assert "fused_update_kernel" in verdict.reason


def test_a_kernel_that_ncu_did_not_see_fails(tmp_path: Path) -> None:
    seen = ("multi_tensor_l2_norm_kernel", "fused_update_kernel")
    verdict = judge_ncu(tmp_path, ncu_table(only=seen))
    assert (verdict.status, verdict.reason) == (
        FAILED,
        "ncu saw no launch of multi_tensor_unscale_kernel",
    )


def test_an_unknown_unit_fails(tmp_path: Path) -> None:
    verdict = judge_ncu(tmp_path, ncu_table().replace('"byte"', '"sector"'))
    assert verdict.status == FAILED
    assert "'sector'" in verdict.reason


def test_ncu_without_counters_is_no_failure_of_ours(tmp_path: Path) -> None:
    refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission."
    verdict = judge_ncu(tmp_path, f"==PROF== Connected\n{refused}\n")
    assert (verdict.status, verdict.acceptable) == (NOT_RUN, True)
    assert verdict.reason.startswith("ncu does not work here: ERR_NVGPUCTRPERM")


def test_a_workload_that_fails_is_one(tmp_path: Path) -> None:
    crash = "==ERROR== The application returned an error code (1)."
    assert judge_ncu(tmp_path, f"{crash}\n").status == FAILED
    assert judge_ncu(tmp_path, ncu_table(), status=1).status == FAILED


# --- benchmark -----------------------------------------------------------------------------------


def test_benchmark_keeps_ratios_and_bandwidths(tmp_path: Path) -> None:
    case = {
        "name": "step/large",
        "subject": "torchfuse",
        "ratios": {"torch fused": {"of_medians": 1.25}},
        "gb_per_s": {"torchfuse": 4000.0, "torch fused": 3200.0},
    }
    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps({"cases": [case]}))
    verdict = judges.judge_benchmark(path)(Finished(0, ""))
    assert verdict.key == "1 cases; step/large 1.25x torch fused, 4000 GB/s"
    assert verdict.figures["step/large"]["ratios"] == {"torch fused": 1.25}
    path.write_text(json.dumps({"cases": []}))
    assert judges.judge_benchmark(path)(Finished(0, "")).status == FAILED
