# SPDX-License-Identifier: BSD-3-Clause
"""The stages in order of value: what is run, for how long at most, and how it is judged.

Paths are relative to the repository, where every command is started.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path

from gpu_suite import parsers
from gpu_suite.judges import (
    BYTE_MODEL,
    DRAM_METRICS,
    DURATION_METRIC,
    judge_benchmark,
    judge_listing,
    judge_ncu,
    judge_sanitizer,
    judge_tests,
    rehearsal,
)
from gpu_suite.model import NEEDS_A_GPU, NOT_RUN, Command, Stage, Verdict, judge_status
from gpu_suite.prerequisites import Machine

ROOT = Path(__file__).resolve().parents[2]
WORK = Path("build/gpu_suite")
OUTPUTS = WORK / "out"
LOGS = WORK / "logs"

BUILD, BUILD_TESTS = "build", "build of the C++ tests"
BENCHMARK = "benchmark, quick set"
BENCHMARK_RESULT = OUTPUTS / "benchmark.json"
PYTHON_TARGETS = ("torchfuse", "torchfuse_C")
# The same property tests: on the device, and on the emulation that runs the kernels on the CPU.
DEVICE_TESTS = Path("tests/cpp/kernels/cuda/torchfuse_cuda_kernel_tests")
EMULATED_TESTS = Path("tests/cpp/kernels/cuda/torchfuse_cuda_on_cpu_tests")
# Labels under which ctest knows these two, which have a stage of their own.
OWN_STAGE_LABELS = "^(cuda|cuda_on_cpu)$"
SANITIZER_FILTER = "*Sanitizer*:*Small*"
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
CUDA_TESTS = Path("tests/python/cuda")
# By name in the summary; NCCL, which torch may lack, is the last of them.
CUDA_FILES = {
    "CPU = CUDA in Python": "test_cpu_equals_cuda.py",
    "determinism": "test_determinism.py",
    "synchronization": "test_synchronization.py",
    "CUDA graphs": "test_graphs.py",
    "streams and load": "test_streams.py",
    "second device": "test_second_device.py",
    "storage modes": "test_storage_modes.py",
    "clipping": "test_clipping.py",
    "batch normalisation": "test_batch_norm.py",
    "NCCL, world of one": "test_nccl.py",
}
OPCHECK = Path("tests/python/ops/test_opcheck.py")
WORKLOAD = Path("tools/gpu_suite/ncu_workload.py")
NCU_NUMEL, REHEARSED_NUMEL = 2**26, 4096


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the commands depend on."""

    machine: Machine
    with_cuda: bool

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU; the pretended one is none."""
        return self.with_cuda and not self.machine.pretends

    @property
    def build(self) -> Path:
        """CMake's folder; that of the pretended device is there already."""
        if self.machine.pretends:
            return Path(os.environ.get("TORCHFUSE_BUILD_DIR", "build/dev"))
        return Path("build/gpu" if self.with_cuda else "build/gpu-without-cuda")

    @property
    def site(self) -> Path:
        """The folder that goes on PYTHONPATH: an installation in the checkout stays as it is."""
        return self.build / "site"

    @property
    def slowness(self) -> float:
        """The time limits suit 16 cores with a GPU; without a GPU few cores must do."""
        return 1.0 if self.on_gpu else 10.0

    @property
    def device(self) -> str:
        """Torch's name of the device under test."""
        return "cuda" if self.with_cuda else "cpu"

    def tool(self, name: str) -> str:
        """Path of a tool, or its bare name in commands that are only shown."""
        return self.machine.tools[name] or name

    def program(self, path: Path) -> str:
        """A program of the build, to be started from the root."""
        return f"./{self.build / path}"


def copy_package(site: Path) -> None:
    """Copies the Python sources alone; CMake installs the native part beside the copies."""
    ignored = shutil.ignore_patterns("*.so", "lib", "include", "build_info.json", "__pycache__")
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "python/torchfuse", site / "torchfuse", ignore=ignored)


def _build_commands(setup: Setup) -> tuple[Command, ...]:
    cmake, build, package = setup.tool("cmake"), str(setup.build), f"{setup.site}/torchfuse"
    configure = [cmake, "-S", ".", "-B", build, "-G", "Ninja"]
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INSTALL_LIBDIR": "lib",
        "CMAKE_MAKE_PROGRAM": setup.tool("ninja"),
        "Python_EXECUTABLE": sys.executable,
        "TORCHFUSE_BUILD_TESTS": "ON",
        "TORCHFUSE_GTEST_SOURCE": str(setup.machine.gtest_source),
        "TORCHFUSE_WITH_CUDA": "ON" if setup.with_cuda else "OFF",
    }
    gpu = setup.machine.gpu
    if setup.with_cuda and gpu is not None:
        major, minor = gpu["capability"]
        options["CMAKE_CUDA_COMPILER"] = setup.tool("nvcc")
        options["CMAKE_CUDA_ARCHITECTURES"] = f"{major}{minor}-real"
    configure += [f"-D{name}={value}" for name, value in options.items()]
    compile_all = (cmake, "--build", build)  # ninja uses all cores
    targets: tuple[str, ...] = PYTHON_TARGETS
    if setup.machine.pretends:
        configure = [cmake, "-B", build, "-DTORCHFUSE_PRETENDED_CUDA=ON"]
        targets = (*PYTHON_TARGETS, "pretended_cuda")
    install = (cmake, "--install", build, "--prefix", package)
    show = "import json, torchfuse; print(json.dumps(torchfuse._C.build_info()))"
    return (
        Command(tuple(configure)),
        # Everything at once keeps all cores busy; a C++ test that does not compile must not keep
        # the Python tests from running.
        Command((*compile_all, "--", "-k", "0"), may_fail=True),
        Command((*compile_all, "--target", *targets)),
        Command(install),
        Command((*install, "--component", "python")),
        Command((sys.executable, "-c", show)),
    )


def build_stages(setup: Setup) -> list[Stage]:
    """The library and its Python module, then whatever else there is to compile."""
    compile_all = (setup.tool("cmake"), "--build", str(setup.build))
    return [
        Stage(
            BUILD,
            _build_commands(setup),
            timeout=330,
            prepare=lambda: copy_package(ROOT / setup.site),
        ),
        Stage(BUILD_TESTS, (Command(compile_all),), timeout=120, needs=(BUILD,)),
    ]


def comparison_stage(setup: Setup) -> Stage:
    """CPU = CUDA bit for bit, by the property tests without torch."""
    program = setup.program(DEVICE_TESTS if setup.on_gpu else EMULATED_TESTS)
    report = OUTPUTS / "comparison.xml"
    return Stage(
        "CPU = CUDA in C++",
        (Command((program, f"--gtest_output=xml:{report}")),),
        timeout=120,
        judge=judge_tests(ROOT / report, setup.on_gpu, may_skip=False),
        needs=(BUILD_TESTS,),
    )


def ctest_stage(setup: Setup) -> Stage:
    """The C++ tests without a stage of their own."""
    report = OUTPUTS / "ctest.xml"
    command = [setup.tool("ctest"), "--test-dir", str(setup.build), "--no-tests=error"]
    command += ["--output-on-failure", "--parallel", str(setup.machine.cores)]
    command += ["--timeout", f"{60 * setup.slowness:.0f}"]
    command += ["--label-exclude", OWN_STAGE_LABELS, "--output-junit", str(ROOT / report)]
    return Stage(
        "C++ tests",
        (Command(tuple(command)),),
        timeout=90,
        judge=judge_tests(ROOT / report, setup.with_cuda),
        needs=(BUILD_TESTS,),
    )


def _pytest(setup: Setup, report: Path, *arguments: str, parallel: bool = False) -> Command:
    """One run of pytest; with xdist half of the cores work, two threads each."""
    machine = setup.machine
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    command.append(f"--junit-xml={report}")
    # Threads that wait must not spin: on shared cores that costs a factor of four.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    workers = min(8, machine.cores // 2)
    if parallel and machine.has("xdist") and workers > 1:
        command += ["-n", str(workers)]
        environment["OMP_NUM_THREADS"] = "2"
    if machine.has("pytest_timeout"):
        command.append(f"--timeout={90 * setup.slowness:.0f}")
    return Command(tuple(command), environment)


def _without_opcheck(setup: Setup) -> list[str]:
    return [] if setup.machine.has("expecttest") else [f"--ignore={OPCHECK}"]


def left_out(setup: Setup) -> list[str]:
    """What no stage runs, and why; part of the result."""
    if setup.machine.has("expecttest"):
        return []
    return [f"{OPCHECK}: opcheck needs expecttest. Run `pip install expecttest`."]


def python_stage(setup: Setup, on_cuda: bool) -> Stage:
    """The tests that need CUDA, or all others."""
    name = "Python tests on CUDA" if on_cuda else "Python tests on the CPU"
    report = OUTPUTS / ("python-cuda.xml" if on_cuda else "python-cpu.xml")
    marks = ["-m", f"{'' if on_cuda else 'not '}cuda and not slow"]
    arguments = ["tests/python", f"--ignore={CUDA_TESTS}", *_without_opcheck(setup), *marks]
    command = _pytest(setup, report, *arguments, parallel=True)
    judge = judge_tests(ROOT / report, setup.with_cuda)
    announced: tuple[Command, ...] = ()
    if on_cuda and not setup.with_cuda:
        announced = (command,)
        command = _pytest(setup, report, *arguments, "--collect-only")
        judge = rehearsal(judge_listing("tests listed", parsers.listed_pytests))
    return Stage(name, (command,), timeout=180, judge=judge, needs=(BUILD,), announced=announced)


def sanitizer_stages(setup: Setup) -> list[Stage]:
    """compute-sanitizer's four tools over small shapes; without a GPU, the filter is tried."""
    stages = []
    selected = f"--gtest_filter={SANITIZER_FILTER}"
    for tool in SANITIZERS:
        report = OUTPUTS / f"{tool}.xml"
        command = [setup.tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "1"]
        command += [setup.program(DEVICE_TESTS), selected, f"--gtest_output=xml:{report}"]
        stage = Stage(
            f"compute-sanitizer {tool}",
            (Command(tuple(command)),),
            timeout=75,
            judge=judge_sanitizer(ROOT / report),
            needs=(BUILD_TESTS,),
        )
        if not setup.on_gpu:
            listing = (setup.program(EMULATED_TESTS), "--gtest_list_tests", selected)
            judge = rehearsal(judge_listing("tests selected", parsers.listed_gtests))
            stage = dataclasses.replace(
                stage, commands=(Command(listing),), announced=stage.commands, judge=judge
            )
        elif setup.machine.tools["compute-sanitizer"] is None:
            reason = "compute-sanitizer was not found. Put the CUDA toolkit's bin folder on PATH."
            stage = dataclasses.replace(stage, verdict=Verdict(NOT_RUN, reason))
        stages.append(stage)
    return stages


def cuda_file_stages(setup: Setup) -> list[Stage]:
    """tests/python/cuda by file. Without a GPU their CPU cases run, if there are any."""
    stages = []
    for name, file in CUDA_FILES.items():
        report = OUTPUTS / Path(file).with_suffix(".xml")
        command = _pytest(setup, report, str(CUDA_TESTS / file), "-m", "not slow")
        judge = judge_tests(ROOT / report, setup.with_cuda, may_be_empty=not setup.with_cuda)
        stage = Stage(name, (command,), timeout=60, judge=judge, needs=(BUILD,))
        if setup.with_cuda and file == "test_nccl.py" and not setup.machine.facts["nccl"]:
            reason = "torch was built without NCCL"
            stage = dataclasses.replace(stage, verdict=Verdict(NOT_RUN, reason, required=False))
        stages.append(stage)
    return stages


def benchmark_stage(setup: Setup) -> Stage:
    """The quick set, verified against torch by itself; times of a pretended device mean nothing."""
    command = [sys.executable, "benchmarks/run.py", "--quick", "--device", setup.device]
    needs_a_gpu = Verdict(NOT_RUN, NEEDS_A_GPU, required=False)
    return Stage(
        BENCHMARK,
        (Command((*command, "--out", str(BENCHMARK_RESULT))),),
        timeout=120,
        judge=judge_benchmark(ROOT / BENCHMARK_RESULT),
        needs=(BUILD,),
        verdict=needs_a_gpu if setup.machine.pretends else None,
    )


def ncu_stage(setup: Setup) -> Stage:
    """DRAM bytes of the kernels against the byte model."""
    table = OUTPUTS / "ncu.csv"
    numel = NCU_NUMEL if setup.on_gpu else REHEARSED_NUMEL
    workload = [sys.executable, str(WORKLOAD), "--device", setup.device, "--numel", str(numel)]
    ncu = [setup.tool("ncu"), "--csv", "--print-units", "base", "--clock-control", "none"]
    ncu += ["--metrics", ",".join((*DRAM_METRICS, DURATION_METRIC))]
    ncu += ["--kernel-name", f"regex:{'|'.join(BYTE_MODEL)}", "--log-file", str(table)]
    measured = Command((*ncu, *workload), may_fail=True)
    stage = Stage(
        "ncu, bytes against the model",
        (Command(tuple(workload)), measured),
        timeout=90,
        judge=judge_ncu(ROOT / table, numel),
        needs=(BUILD,),
    )
    if not setup.on_gpu:
        return dataclasses.replace(
            stage, commands=stage.commands[:1], announced=(measured,), judge=rehearsal(judge_status)
        )
    if setup.machine.tools["ncu"] is None:
        verdict = Verdict(NOT_RUN, "ncu does not work here: it was not found", required=False)
        return dataclasses.replace(stage, verdict=verdict)
    return stage


def all_stages(setup: Setup) -> list[Stage]:
    """In order of value: where time runs out, what is left out matters least."""
    stages = [
        *build_stages(setup),
        comparison_stage(setup),
        ctest_stage(setup),
        python_stage(setup, on_cuda=True),
        *sanitizer_stages(setup),
        *cuda_file_stages(setup),
        benchmark_stage(setup),
        ncu_stage(setup),
        python_stage(setup, on_cuda=False),
    ]
    return [dataclasses.replace(stage, timeout=stage.timeout * setup.slowness) for stage in stages]
