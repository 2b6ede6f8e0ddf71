# SPDX-License-Identifier: BSD-3-Clause
"""The three calls and their stages: what is run, for how long at most, and how it is judged.

Scripts run in the repository's root. `$REPORT` is the file that a stage is judged by.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_suite import judges
from gpu_suite.judges import Judge

ROOT = Path(__file__).resolve().parents[2]
# The same property tests: on the device, and on the emulation that runs the kernels on the CPU.
DEVICE_TESTS = "tests/cpp/kernels/cuda/torchfuse_cuda_kernel_tests"
EMULATED_TESTS = "tests/cpp/kernels/cuda/torchfuse_cuda_on_cpu_tests"
LIBRARY = "torchfuse torchfuse_C"
PYTHON = shlex.quote(sys.executable)
# What tests in Python start or import.
PROGRAMS = ("torchfuse_programs", "torchfuse_synchronous_gloo")
SANITIZER_FILTER = "*Sanitizer*:*Small*"
# Every optimizer, clipped too, on tensors that are allocated one by one.
SANITIZED_FILE = "tests/python/optimizers/test_optim_specs.py"
SANITIZED_TESTS = "formula_rounded_once or scaled-and-clipped"
LARGE_FILE = "tests/python/cuda/test_large.py"
NCU_NUMEL, REHEARSED_NUMEL = 2**26, 4096


@dataclasses.dataclass(frozen=True)
class Stage:
    """A script that is timed and judged."""

    name: str
    minutes: float
    script: str
    judge: Judge = judges.judge_status
    rehearsal: str | None = None  # runs on the pretended device; None: only a GPU will do
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Call:
    """What one start of the suite does."""

    minutes: float
    tools: tuple[str, ...]
    stages: tuple[Stage, ...]


def _build(facts: Mapping[str, Any], *targets: str) -> Stage:
    """The library and its module, which must compile, and the tests, which fail by themselves."""
    major, minor = facts.get("capability") or (0, 0)
    # The package is a copy, so that an installation in the checkout stays as it is.
    script = f"""
cmake --preset gpu -DPython_EXECUTABLE={PYTHON} -DCMAKE_CUDA_ARCHITECTURES={major}{minor}-real
cmake --build build/gpu --target {LIBRARY} {" ".join(targets)} -- -k 0 || true
cmake --build build/gpu --target {LIBRARY}
rm -rf build/gpu/site
mkdir build/gpu/site
cp -r python/torchfuse build/gpu/site/
cmake --install build/gpu --prefix build/gpu/site/torchfuse
cmake --install build/gpu --prefix build/gpu/site/torchfuse --component python
"""
    show = f"{PYTHON} -c 'import torchfuse; print(torchfuse._C.build_info())'"
    return Stage("build", 5, script + show, rehearsal=show)


def _gtest(name: str, minutes: float, tests: str, before: str = "", **options: Any) -> Stage:
    """A program with its arguments, behind a command such as a sanitizer; if it compiled."""
    build = f"cmake --build build/gpu --target {Path(tests.split()[0]).name}"
    run = f"{before} build/gpu/{tests} --gtest_output=xml:$REPORT".strip()
    return Stage(name, minutes, f"{build}\n{run}", **{"judge": judges.judge_tests, **options})


def _pytest(arguments: str, workers: int = 0) -> str:
    # A test that hangs shows where. Processes share the cores, two threads each.
    options = "-q -p no:cacheprovider -o faulthandler_timeout=120 --junitxml=$REPORT"
    parallel = f" -n {workers} --dist worksteal" if workers > 1 else ""
    return f"{PYTHON} -m pytest {options}{parallel} {arguments}"


def _tests(facts: Mapping[str, Any]) -> Call:
    on_cuda = _pytest("tests/python -m 'cuda and not slow'", min(8, facts["cores"] // 2))
    large = _pytest(f"{LARGE_FILE} -m slow")
    options = "--suite gpu --device cuda --rounds 7 --out $REPORT"
    benchmarks = f"{PYTHON} benchmarks/run.py {options}"
    stages = (
        _build(facts, Path(DEVICE_TESTS).name, *PROGRAMS),
        _gtest(
            "kernels, CPU = CUDA",
            2,
            DEVICE_TESTS,
            environment={"TORCHFUSE_REPETITIONS": "10000"},
            rehearsal=f"$TORCHFUSE_BUILD_DIR/{EMULATED_TESTS} --gtest_output=xml:$REPORT",
        ),
        Stage("Python tests on CUDA", 4, on_cuda, judges.judge_tests, rehearsal=on_cuda),
        # Times of a pretended device mean nothing.
        Stage("benchmarks", 2.5, benchmarks, judges.judge_benchmark),
        Stage("tensors beyond 2^31 elements", 1, large, judges.judge_tests),
    )
    return Call(9, ("cmake", "ninja", "c++", "nvcc"), stages)


def _sanitizers(facts: Mapping[str, Any]) -> Call:
    def under(tool: str) -> str:
        # Behind each allocation, so that it has no neighbor that an access could fall into.
        padding = " --padding 512" if tool == "memcheck" else ""
        return f"compute-sanitizer --tool {tool}{padding} --error-exitcode 99"

    # Neither margins nor fresh contents of ours, which would hide what the tools look for.
    exact = {"TORCHFUSE_EXACT_ALLOCATIONS": "1"}
    judge = judges.judge_sanitizer
    stages = [_build(facts, Path(DEVICE_TESTS).name)]
    small = f"{DEVICE_TESTS} --gtest_filter='{SANITIZER_FILTER}'"
    for tool in ("memcheck", "initcheck", "racecheck", "synccheck"):
        stages.append(_gtest(tool, 1.25, small, under(tool), judge=judge, environment=exact))
    sanitized = f"{SANITIZED_FILE} -m cuda -k '{SANITIZED_TESTS}'"
    # torch asks the driver what may fail; accesses are what counts.
    python = f"{under('memcheck')} --report-api-errors no {_pytest(sanitized)}"
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    stages.append(Stage("memcheck of Python tests", 3, python, judge, environment=uncached))
    return Call(7, ("cmake", "ninja", "c++", "nvcc", "compute-sanitizer"), tuple(stages))


def _ncu(facts: Mapping[str, Any]) -> Call:
    metrics = ",".join(judges.DRAM_METRICS)
    workload = f"{PYTHON} tools/gpu_suite/ncu_workload.py"
    measured = (
        f"ncu --csv --print-units base --clock-control none --log-file $REPORT "
        f"--metrics {metrics},{judges.DURATION_METRIC} "
        f"--kernel-name 'regex:{'|'.join(judges.BYTE_MODEL)}' {workload} {NCU_NUMEL}"
    )
    stages = (
        _build(facts, "torchfuse_api_tests"),
        Stage(
            "bytes against the model",
            1.5,
            f"{workload} {NCU_NUMEL}\n{measured}",
            functools.partial(judges.judge_ncu, NCU_NUMEL),
            rehearsal=f"{workload} {REHEARSED_NUMEL}",
        ),
        _gtest("C++ classes", 2, "tests/cpp/torchfuse_api_tests"),
    )
    return Call(6, ("cmake", "ninja", "c++", "nvcc", "ncu"), stages)


CALLS = {"tests": _tests, "sanitizers": _sanitizers, "ncu": _ncu}
