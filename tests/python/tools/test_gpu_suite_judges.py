# SPDX-License-Identifier: BSD-3-Clause
"""The GPU suite reads what its tools print, and lets nothing pass that proves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from gpu_suite import judges
from gpu_suite.judges import Finished, Judge, Verdict

# Of GoogleTest, and of pytest.
PASSED = '<testcase classname="Norm" name="Small" status="run" result="completed" time="0.1"/>'
FAILED = '<testcase classname="Norm" name="Large" status="run"><failure message="no"/></testcase>'
NOT_RUN = '<testcase classname="Norm" name="Off" status="notrun" result="suppressed"/>'
ERROR = '<testcase classname="amp.test_a" name="test_b[cuda]"><error message="no"/></testcase>'
SKIPPED = '<testcase classname="t" name="s"><skipped message="one  processor"/></testcase>'


def report(*cases: str) -> str:
    return f'<testsuites><testsuite name="all">{"".join(cases)}</testsuite></testsuites>'


GOOD = report(PASSED, PASSED)
Decide = Callable[..., Verdict]


@pytest.fixture
def decide(tmp_path: Path) -> Decide:
    """The verdict about a stage that left this report, or none."""

    def decide(judge: Judge, text: str | None, status: int = 0, log: str = "") -> Verdict:
        report = tmp_path / "report"
        report.unlink(missing_ok=True)
        if text is not None:
            report.write_text(text)
        return judge(Finished(status, log, report))

    return decide


def test_reports_are_counted() -> None:
    # What fails before the first test has no name.
    unnamed = '<testcase name=""><error/></testcase>'
    counted = judges.read_junit(report(PASSED, FAILED, ERROR, unnamed, SKIPPED, SKIPPED, NOT_RUN))
    failed = ["Norm::Large", "amp.test_a::test_b[cuda]", "no test by itself"]
    assert counted == (1, failed, {"one processor": 2, "not run": 1})


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (GOOD, 0, ""),
        (GOOD, 1, "exit status 1"),
        (None, 139, "exit status 139, report cannot be read: "),
        (GOOD[:40], 0, "report cannot be read: "),
        (report(), 0, "no test passed"),
        (report(PASSED, FAILED), 1, "Norm::Large failed"),
        (report(PASSED, ERROR, FAILED), 0, "amp.test_a::test_b[cuda] and 1 more failed"),
        (report(PASSED, SKIPPED, SKIPPED), 0, "2 skipped that must run: one processor"),
        (report(PASSED, NOT_RUN), 0, "1 skipped that must run: not run"),
    ],
)
def test_tests_pass_only_if_some_passed_and_none_failed(
    text: str | None, status: int, reason: str, decide: Decide
) -> None:
    verdict = decide(judges.judge_tests, text, status)
    assert (reason in verdict.reason) if reason else (verdict.key == "2 passed")


@pytest.mark.parametrize(
    ("reason", "may"),
    [
        ("needs 2 CUDA devices, for NCCL wants one for each process", True),
        ("accesses are not counted", True),
        ("needs a CUDA device", False),
        ("this torch is built without nccl", False),
        ("could not import 'expecttest'", False),
        ("torchfuse_programs is not built in build/gpu; make programs builds it", False),
    ],
)
def test_nothing_is_skipped_for_being_absent(reason: str, may: bool, decide: Decide) -> None:
    text = report(PASSED, SKIPPED.replace("one  processor", reason))
    verdict = decide(judges.judge_tests, text)
    assert verdict.reason == ("" if may else f"1 skipped that must run: {reason}")


# --- compute-sanitizer ---------------------------------------------------------------------------

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
========= ERROR SUMMARY: {}
"""
RACECHECK = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: {}\n"
NO_DEVICE = "========= COMPUTE-SANITIZER\n========= Error: Device not supported\n"


@pytest.mark.parametrize(
    ("tests", "log", "status", "reason"),
    [
        (GOOD, MEMCHECK.format("0 errors"), 0, ""),
        (GOOD, MEMCHECK.format("2 errors"), 99, "2 errors"),
        # One summary for each process.
        (GOOD, MEMCHECK.format("0 errors") + MEMCHECK.format("1 error"), 0, "1 errors"),
        (GOOD, RACECHECK.format("0 hazards displayed (0 errors, 0 warnings)"), 0, ""),
        (GOOD, RACECHECK.format("3 hazards displayed (2 errors, 1 warning)"), 99, "3 errors"),
        (GOOD, NO_DEVICE, 1, "Error: Device not supported (exit status 1)"),
        (GOOD, "no such tool", 0, "no summary was printed (exit status 0)"),
        (GOOD, MEMCHECK.format("0 errors"), 99, "exit status 99"),
        (report(), MEMCHECK.format("0 errors"), 0, "no test passed"),
    ],
)
def test_sanitizer(tests: str, log: str, status: int, reason: str, decide: Decide) -> None:
    assert decide(judges.judge_sanitizer, tests, status, log).reason == reason


# --- ncu -----------------------------------------------------------------------------------------

NUMEL = 2**26
JUDGE_NCU = partial(judges.judge_ncu, NUMEL)
HEADER = '"ID","Process Name","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"'
NAMES = {
    "multi_tensor_l2_norm_kernel": "void torchfuse::cuda::<unnamed>::{}<float>(NormLaunch)",
    "multi_tensor_unscale_kernel": "torchfuse::(anonymous namespace)::{}<float>(UnscaleLaunch)",
    "fused_update_kernel": "void torchfuse::cuda::{}<TypedAccess<Adam, (DType)0>, (bool)1>(X)",
}


def ncu_table(factor: float = 1.0, only: tuple[str, ...] = tuple(NAMES)) -> str:
    """What ncu --csv --print-units base writes, with a share of the model's bytes."""
    lines = ["==PROF== Connected to process 123 (/usr/bin/python3.12)", HEADER]
    for index, kernel in enumerate(only):
        read, written = judges.BYTE_MODEL[kernel]
        launch = f'"{index}","python3.12","{NAMES[kernel].format(kernel)}","(4096, 1, 1)"'
        lines += [
            f'{launch},"dram__bytes_read.sum","byte","{read * NUMEL * factor:,.0f}"',
            f'{launch},"dram__bytes_write.sum","byte","{written * NUMEL * factor:,.0f}"',
            f'{launch},"gpu__time_duration.sum","ns","91,040"',
        ]
    return "\n".join([*lines, "==PROF== Disconnected from process 123"])


def test_bytes_of_the_model_pass(decide: Decide) -> None:
    verdict = decide(JUDGE_NCU, ncu_table(1.02))
    assert verdict.reason == ""
    figures = {"read_per_element": 16.32, "written_per_element": 12.24, "of_model": 1.02}
    figures["microseconds"] = 91.04
    assert verdict.figures["fused_update_kernel"] == pytest.approx(figures)
    assert "multi_tensor_l2_norm 1.020x" in verdict.key


@pytest.mark.parametrize(
    ("table", "status", "reason"),
    [
        (ncu_table(1.06), 0, "fused_update_kernel outside 0.5 to 1.05x model"),
        (ncu_table(0.4), 0, "fused_update_kernel outside 0.5 to 1.05x model"),
        (ncu_table(only=tuple(NAMES)[::2]), 0, "ncu saw no launch of multi_tensor_unscale_kernel"),
        (ncu_table().replace('"byte"', '"sector"'), 0, "'sector'"),
        (None, 0, "ncu saw no launch of"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission.\n", 0, "ncu: ERR_NVGPUCTRPERM"),
        ("==ERROR== The application returned an error code (1).\n", 1, "ncu: The application"),
        (ncu_table(), 1, "exit status 1"),
    ],
)
def test_bytes_outside_the_model_or_unseen_fail(
    table: str | None, status: int, reason: str, decide: Decide
) -> None:
    assert reason in decide(JUDGE_NCU, table, status).reason


# --- benchmark -----------------------------------------------------------------------------------


def test_benchmark_keeps_times_ratios_and_bandwidths(decide: Decide) -> None:
    case = {
        "name": "step/large",
        "subject": "torchfuse",
        "seconds": {"torchfuse": {"median": 0.5}},
        "ratios": {"torch fused": {"of_medians": 1.25, "per_round": 1.24}},
        "gb_per_s": {"torchfuse": 4000.0, "torch fused": 3200.0, "copy": 5000.0},
        "reference": "copy",
        "host": {"seconds": {"torchfuse": {"median": 1e-4}}},
        "samples": {"torchfuse": [0.5, 0.5]},
    }
    verdict = decide(judges.judge_benchmark, json.dumps({"cases": [case]}))
    assert (verdict.reason, verdict.key) == ("", "1 cases; step/large 4000 GB/s, 0.80x a copy")
    kept = ("seconds", "ratios", "gb_per_s", "host")
    assert verdict.figures == {"step/large": {name: case[name] for name in kept}}
    untimed = {**case, "seconds": {"torchfuse": {"median": 0.0}}}
    for cases, reason in (([], "no time of any case"), ([untimed], "no time of step/large")):
        verdict = decide(judges.judge_benchmark, json.dumps({"cases": cases}))
        assert verdict.reason == reason
    assert decide(judges.judge_benchmark, None, 1).reason == "exit status 1"
