# SPDX-License-Identifier: BSD-3-Clause
"""The runner of the GPU suite: what it refuses, how it goes on after failures, what it writes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from pathlib import Path
from typing import Any

import pytest
from gpu_suite import __main__ as program
from gpu_suite import prerequisites, report, runner
from gpu_suite.model import FAILED, NOT_RUN, PASSED, Command, Finished, Stage, Verdict
from gpu_suite_machine import TOOLS, machine

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools/gpu_suite.sh"


def python(code: str, **options: Any) -> Command:
    return Command((sys.executable, "-c", code), **options)


# --- What is missing ---------------------------------------------------------------------------


def run_script(tmp_path: Path, python_path: Path) -> subprocess.CompletedProcess[str]:
    """The script with next to nothing on PATH, away from the checkout."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    environment = {
        "PATH": str(tools),
        "PYTHON": str(python_path),
        "TORCHFUSE_GTEST_SOURCE": str(tmp_path),
    }
    return subprocess.run(
        [str(tools / "bash"), str(SCRIPT)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    result = run_script(tmp_path, tmp_path / "bare/bin/python")
    assert result.returncode == 2
    assert result.stdout == ""
    for name in ("cmake", "ninja", "c++", "torch", "GPU", "pytest", "GoogleTest"):
        assert re.search(rf"^  {re.escape(name)}: .*\.$", result.stderr, re.MULTILINE), name
    assert "has no CMakeLists.txt" in result.stderr
    assert "No module named 'torch'" in result.stderr


def test_without_python_the_rest_is_named_too(tmp_path: Path) -> None:
    result = run_script(tmp_path, tmp_path / "python")
    assert result.returncode == 2
    for name in ("Python", "cmake", "ninja", "nvcc"):
        assert f"  {name}: " in result.stderr


def test_a_machine_with_everything_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").touch()
    complete = dataclasses.replace(
        machine(), gtest_source=tmp_path, tools={name: name for name in TOOLS}
    )
    headers = [line for line in prerequisites.missing(complete, True) if "Python.h" not in line]
    assert headers == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"torch": None, "torch_error": "libcudart.so.13: not found"}, "libcudart.so.13"),
        ({"cuda": None}, "torch with CUDA: "),
        ({"gpu": None}, "GPU: torch sees none"),
        ({"packages": []}, "pytest: "),
        ({}, "nvcc: not on PATH"),
    ],
)
def test_each_missing_thing_has_a_remedy(facts: dict[str, Any], expected: str) -> None:
    lines = prerequisites.missing(machine(**facts), with_cuda=True)
    (line,) = [line for line in lines if expected in line]
    assert re.search(r"(Install|Run|set|Name) ", line)


def test_without_cuda_no_gpu_is_asked_for() -> None:
    lines = prerequisites.missing(machine(cuda=None, gpu=None), with_cuda=False)
    assert not any(line.startswith(("GPU", "nvcc", "torch")) for line in lines)


def test_a_probe_that_dies_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch: a symbol is missing')\n")
    facts = prerequisites.run_probe({"PATH": "", "PYTHONPATH": str(tmp_path)})
    assert (facts["torch"], facts["torch_error"]) == (None, "torch: a symbol is missing")


# --- Running stages ----------------------------------------------------------------------------


def run_stages(folder: Path, *todo: Stage, budget: float = 60.0) -> dict[str, runner.Result]:
    results: dict[str, runner.Result] = {}
    executor = runner.Runner(folder, folder, os.environ, budget, time.monotonic())
    executor.run_all(todo, lambda result: results.__setitem__(result.name, result))
    return results


def test_a_failing_stage_does_not_stop_the_next(tmp_path: Path) -> None:
    def explode(_: Finished) -> Verdict:
        raise KeyError("no such figure")

    results = run_stages(
        tmp_path,
        Stage("build", (python("print('compiling'); raise SystemExit(3)"), python("1/0")), 60),
        Stage("tests", (python("print('unreachable')"),), 60, needs=("build",)),
        Stage("judge", (python("pass"),), 60, judge=explode),
        Stage("absent", (Command(("/no/such/program",)),), 60),
        Stage("benchmark", (python("raise SystemExit(1)", may_fail=True), python("pass")), 60),
    )
    verdicts = {
        name: (result.verdict.status, result.verdict.reason) for name, result in results.items()
    }
    assert verdicts["build"] == (FAILED, "exit status 3")
    assert "compiling" in results["build"].log
    assert "ZeroDivisionError" not in results["build"].log
    assert verdicts["tests"] == (NOT_RUN, "needs: build")
    assert verdicts["judge"][0] == FAILED
    assert "no such figure" in verdicts["judge"][1]
    assert verdicts["absent"] == (FAILED, "exit status 127")
    assert "cannot start /no/such/program" in results["absent"].log
    assert verdicts["benchmark"] == (PASSED, "")


def test_a_stage_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    results = run_stages(
        tmp_path, Stage("hangs", (python(code),), 3), Stage("next", (python("pass"),), 60)
    )
    assert results["hangs"].verdict == Verdict(FAILED, "stopped after 3 s: its limit")
    assert results["next"].verdict.status == PASSED
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    # Dead, or waiting for a parent to notice.
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_budget_ends_a_stage_and_leaves_out_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAST_SECONDS", 0.5)
    results = run_stages(
        tmp_path,
        Stage("long", (python("import time; time.sleep(600)"),), 300),
        Stage("next", (python("pass"),), 60),
        budget=2.0,
    )
    assert results["long"].verdict.status == FAILED
    assert results["long"].verdict.reason.endswith("no time left")
    assert results["next"].verdict == Verdict(NOT_RUN, "no time left")


# --- The result --------------------------------------------------------------------------------

SCHEMA: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "format": int,
    "date": str,
    "sha": str,
    "dirty": (bool, type(None)),
    "with_cuda": bool,
    "gpu": (dict, type(None)),
    "driver": (str, type(None)),
    "torch": str,
    "cuda": (str, type(None)),
    "nvcc": (str, type(None)),
    "python": str,
    "cpu": str,
    "cores": int,
    "seconds": float,
    "passed": bool,
    "stages": list,
    "left_out": list,
    "benchmark": (dict, type(None)),
}
STAGE_SCHEMA: dict[str, type] = {
    "name": str,
    "status": str,
    "reason": str,
    "required": bool,
    "seconds": float,
    "key": str,
    "counts": dict,
    "figures": dict,
    "log_tail": str,
}


def check_schema(result: dict[str, Any]) -> None:
    assert list(result) == list(SCHEMA)
    for key, expected in SCHEMA.items():
        assert isinstance(result[key], expected), key
    for stage in result["stages"]:
        assert set(stage) == set(STAGE_SCHEMA)
        for key, kind in STAGE_SCHEMA.items():
            assert isinstance(stage[key], kind), key
    assert {stage["status"] for stage in result["stages"]} <= {PASSED, FAILED, NOT_RUN}


def run_program(
    monkeypatch: pytest.MonkeyPatch, root: Path, todo: list[Stage], *arguments: str
) -> tuple[int, Path, dict[str, Any]]:
    """The whole program over other stages; its status, its result file and what that holds."""
    known = machine()
    monkeypatch.setattr(program, "ROOT", root)
    monkeypatch.setattr(program, "all_stages", lambda _: todo)
    monkeypatch.setattr(program, "build_stages", lambda _: todo[:1])
    monkeypatch.setattr(prerequisites, "inspect", lambda *_: known)
    monkeypatch.setattr(prerequisites, "missing", lambda *_, **__: [])
    monkeypatch.chdir(root)
    status = program.main(["--sha", "0123456789", "--logs", "fetched", *arguments])
    (path,) = [path for path in root.rglob("*.json") if path.parent.name != "fetched"]
    result: dict[str, Any] = json.loads(path.read_text())
    check_schema(result)
    return status, path.relative_to(root), result


def test_a_whole_run_leaves_result_summary_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    excused = Verdict(NOT_RUN, "ncu does not work here: no counters", required=False)
    todo = [
        Stage("build", (python("pass"),), 60),
        Stage("ncu", (), 60, verdict=excused),
        Stage("tests", (python("import os; print(os.getcwd() + '/a.py'); 1/0"),), 60),
    ]
    status, path, result = run_program(monkeypatch, tmp_path, todo)
    assert status == 1
    assert path == Path(f"benchmarks/results/nvidia-h200/{result['date'][:10]}-0123456.json")
    assert (result["gpu"]["name"], result["sha"]) == ("NVIDIA H200", "0123456789")
    assert [stage["status"] for stage in result["stages"]] == [PASSED, NOT_RUN, FAILED]
    assert not result["passed"]
    # The file is committed, so it must not name folders of the machine.
    assert "\na.py\n" in result["stages"][2]["log_tail"]
    output = capsys.readouterr().out
    assert re.search(r"^ncu +not run +0\.0  ncu does not work here: no counters$", output, re.M)
    assert (tmp_path / "fetched/summary.txt").read_text().strip() in output
    assert json.loads((tmp_path / "fetched/result.json").read_text()) == result
    with tarfile.open(tmp_path / "fetched/logs.tar.gz") as archive:
        assert "logs/tests.log" in archive.getnames()


def test_status_is_0_if_all_that_must_run_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    excused = Verdict(NOT_RUN, "needs a GPU", required=False)
    todo = [Stage("build", (python("pass"),), 60), Stage("ncu", (), 60, verdict=excused)]
    status, path, result = run_program(monkeypatch, tmp_path, todo, "--without-cuda")
    assert (status, result["passed"], result["gpu"]) == (0, True, None)
    # Never among the results of GPUs.
    assert path == Path("build/gpu_suite/without-cuda.json")


def test_a_stage_that_was_not_reached_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = python("import os, signal; os.kill(os.getppid(), signal.SIGTERM)")
    todo = [
        Stage("build", (python("pass"),), 60),
        Stage("long", (interrupt, python("import time; time.sleep(600)")), 60),
        Stage("last", (python("pass"),), 60),
    ]
    status, _, result = run_program(monkeypatch, tmp_path, todo)
    assert status == 1
    reasons = [(stage["status"], stage["reason"]) for stage in result["stages"]]
    assert reasons == [(PASSED, ""), (NOT_RUN, "not reached"), (NOT_RUN, "not reached")]


def test_a_partial_run_is_no_result_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = [Stage(name, (python("pass"),), 60) for name in ("build", "tests", "ncu")]
    status, path, result = run_program(monkeypatch, tmp_path, todo, "--only", "ncu")
    assert [stage["status"] for stage in result["stages"]] == [PASSED, NOT_RUN, PASSED]
    assert result["stages"][1]["reason"] == "not selected"
    assert (status, path) == (1, Path("build/gpu_suite/partial.json"))


def test_commit_is_the_named_one_or_gits(tmp_path: Path) -> None:
    assert report.commit(tmp_path, "0123abc") == ("0123abc", None)
    # A checkout without history, which may lie inside of another repository.
    assert report.commit(tmp_path, None) == ("unknown", None)
    with pytest.raises(ValueError, match="TORCHFUSE_SHA"):
        report.commit(tmp_path, "main")


def test_scripts_are_clean() -> None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    shellcheck = shutil.which("shellcheck", path=path)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([shellcheck, str(SCRIPT)], check=True, timeout=60)
