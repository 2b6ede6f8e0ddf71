# SPDX-License-Identifier: BSD-3-Clause
"""The GPU suite: what it refuses, how it goes on after failures, what it writes and resumes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpu_suite import __main__ as program
from gpu_suite import judges, machine, result, stages
from gpu_suite.stages import Call, Stage

ROOT = Path(__file__).resolve().parents[3]
FACTS: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "capability": [9, 0],
    "torch": "2.11.0",
    "torch_root": "/opt/torch",
    "cores": 16,
    "pretended": False,
    "absent": [],
}
Suite = Callable[..., tuple[int, dict[str, Any]]]

# --- What is missing ---------------------------------------------------------------------------


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch: a symbol is missing')\n")
    started = subprocess.run(
        [sys.executable, "-m", "gpu_suite", "sanitizers"],
        env={"PATH": "", "PYTHONPATH": f"{tmp_path}:{ROOT / 'tools'}", "TORCHFUSE_SHA": "main"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (started.returncode, started.stdout) == (2, "")
    for name in ("c++", "compute-sanitizer", "torch", "TORCHFUSE_SHA"):
        assert re.search(rf"^  {re.escape(name)}: .*\.$", started.stderr, re.MULTILINE), name
    assert "torch: a symbol is missing" in started.stderr


def test_what_is_absent_has_a_remedy() -> None:
    assert machine.missing(FACTS, ("sh",), os.defpath) == []
    facts = {**FACTS, "gpu": None, "absent": ["xdist"]}
    gpu, package = machine.missing(facts, (), "")
    assert "rehearse it: tools/on_pretended_cuda.sh" in gpu
    assert package.endswith("Run `pip install pytest-xdist`.")


# --- The stages --------------------------------------------------------------------------------


def all_stages(**facts: Any) -> list[Stage]:
    return [stage for call in stages.CALLS.values() for stage in call({**FACTS, **facts}).stages]


def test_what_the_stages_name_exists() -> None:
    scripts = "\n".join(f"{s.script}\n{s.rehearsal}" for s in all_stages())
    named = set(re.findall(r"(?<!\S)(?:tests|tools|benchmarks)/\S+\.py|tests/python(?= )", scripts))
    assert {stages.SANITIZED_FILE, stages.LARGE_FILE, "benchmarks/run.py"} < named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    files = [f for folder in ("csrc", "tests/cpp") for f in (ROOT / folder).rglob("CMakeLists.txt")]
    described = "\n".join(file.read_text() for file in files)
    targets = {t for words in re.findall(r"--target ([\w ]+)", scripts) for t in words.split()}
    assert set(stages.PROGRAMS) < targets
    assert [t for t in targets if not re.search(rf"[\s(]{t}\s", described)] == []
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    assert set(re.findall(r"--preset (\w+)", scripts)) <= {preset["name"] for preset in presets}
    assert "pretended" not in scripts
    assert "cuda_on_cpu" not in "".join(stage.script for stage in all_stages())


def test_there_is_something_to_sanitize_and_to_measure() -> None:
    tests, kernels = (
        "\n".join(path.read_text() for path in (ROOT / folder).iterdir() if path.is_file())
        for folder in ("tests/cpp/kernels/cuda", "csrc/kernels/cuda")
    )
    names = re.findall(r"^TEST(?:_[FP])?\(\w+, (\w+)\)", tests, re.MULTILINE)
    assert stages.SANITIZER_FILTER == "*Sanitizer*:*Small*"
    assert sum(bool(re.search("Sanitizer|Small", name)) for name in names) > 10
    for kernel in judges.BYTE_MODEL:
        pattern = rf"^ *{kernel}\(\s*const .+ __grid_constant__"
        assert re.search(pattern, kernels, re.MULTILINE), kernel


def test_calls_fit_and_leave_the_gpu_alone() -> None:
    page = (ROOT / "docs/testing.md").read_text()
    for name, call in stages.CALLS.items():
        assert call(FACTS).minutes < 10
        assert f"| `tools/gpu_suite.sh {name}` | {call(FACTS).minutes} |" in page
    scripts = "".join(stage.script for stage in all_stages())
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real" in scripts
    assert "--clock-control none" in scripts
    assert "nvidia-smi" not in scripts


# --- Running them ------------------------------------------------------------------------------


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Runs the program over other stages; its status, and what its file then holds."""

    def start(*todo: Stage, minutes: float = 1, **facts: Any) -> Any:
        monkeypatch.setattr(program, "ROOT", tmp_path)
        monkeypatch.setattr(machine, "probe", lambda: {**FACTS, **facts})
        calls = {"tests": lambda _: Call(minutes, (), todo), "ncu": lambda _: Call(1, (), todo)}
        monkeypatch.setattr(program, "CALLS", calls)
        monkeypatch.setenv("TORCHFUSE_SHA", "0123456789")
        status = program.main(["tests"])
        (path,) = tmp_path.glob("**/nvidia-h200/*.json")
        return status, json.loads(path.read_text())

    return start


def test_whatever_a_stage_does_the_next_has_its_turn(suite: Suite, tmp_path: Path) -> None:
    def explode(_: judges.Finished) -> judges.Verdict:
        raise KeyError("no such figure")

    status, written = suite(
        Stage("build", 1, "true"),
        Stage("tests", 1, f"echo {tmp_path}/a.py; (exit 3); echo not reached"),
        Stage("judge", 1, "true", explode),
        Stage("hangs", 1 / 60, "exec 9> lock; flock 9; sleep 60 & wait"),
        Stage("last", 1, "test $REPORT = $PWD/build/gpu_suite/tests/last.report"),
    )
    entries = written["parts"]["tests"]["stages"]
    assert {name: entry["reason"] for name, entry in entries.items()} == {
        "build": "",
        "tests": "exit status 3",
        "judge": "could not be judged: KeyError('no such figure')",
        "hangs": "stopped after 1 s",
        "last": "",
    }
    for entry in entries.values():
        assert entry["status"] == ("failed" if entry["reason"] else "passed")
    assert (status, written["passed"]) == (1, False)
    # What hangs is ended with its children, of which one holds the lock.
    assert (tmp_path / "lock").exists()
    subprocess.run(["flock", "--timeout", "10", tmp_path / "lock", "true"], check=True)
    # The file is committed, so it must not name folders of the machine.
    assert "\na.py\n" in entries["tests"]["log_tail"]
    (file,) = (tmp_path / "benchmarks/results/nvidia-h200").iterdir()
    assert file.name == f"{written['date'][:10]}-0123456.json"


def test_without_a_build_or_time_nothing_is_run(suite: Suite) -> None:
    _, written = suite(Stage("build", 1, "false"), Stage("next", 1, "true"))
    assert written["parts"]["tests"]["stages"]["next"]["reason"] == "the build failed"
    _, written = suite(Stage("build", 1, "true"), minutes=0.1)
    assert written["parts"]["tests"]["stages"]["build"]["reason"] == "no time left; repeat the call"


def test_a_call_is_resumed_and_other_calls_keep_their_parts(suite: Suite, tmp_path: Path) -> None:
    first, second = (Stage(name, 1, f"echo >> {name}") for name in ("first", "second"))
    build = Stage("build", 1, "echo >> build.txt")
    broken = Stage("second", 1, "false")
    assert suite(build, first, broken)[0] == 1
    other = {"machine": {}, "stages": {"build": {"status": "passed"}}}
    (path,) = tmp_path.glob("benchmarks/results/*/*.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "parts": {**content["parts"], "ncu": other}}))
    status, written = suite(build, first, second)
    assert (status, written["passed"], list(written["parts"])) == (0, True, ["tests", "ncu"])
    lines = {name: (tmp_path / name).read_text() for name in ("build.txt", "first", "second")}
    assert lines == {"build.txt": "\n\n", "first": "\n", "second": "\n"}
    assert suite(build, first, second)[0] == 0
    assert (tmp_path / "build.txt").read_text() == "\n\n"


def test_a_rehearsal_is_no_result_of_a_gpu(suite: Suite, tmp_path: Path) -> None:
    status, written = suite(
        Stage("build", 1, "false", rehearsal="true"),
        Stage("sanitizer", 1, "false"),
        Stage("ncu", 1, "false", partial(judges.judge_ncu, 1), rehearsal="true"),
        Stage("tests", 1, "true", judges.judge_tests, rehearsal="echo > $REPORT"),
        pretended=True,
    )
    entries = written["parts"]["tests"]["stages"]
    assert list(entries) == ["build", "ncu", "tests"]
    assert [entry["status"] for entry in entries.values()] == ["passed", "passed", "failed"]
    assert (status, written["gpu"]) == (1, None)
    assert not (tmp_path / "benchmarks").exists()


# --- Commits -----------------------------------------------------------------------------------


def test_the_commit_is_the_last_one_that_changed_what_is_tested(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        return subprocess.check_output(["git", *identity, *arguments], cwd=tmp_path, text=True)

    with pytest.raises(ValueError, match="Set TORCHFUSE_SHA"):
        result.commit(tmp_path, None)
    with pytest.raises(ValueError, match="expected 7 to 40 hex digits, got 'main'"):
        result.commit(tmp_path, "main")
    git("init", "-q")
    for name in ("csrc/a.cu", "benchmarks/results/gpu/a.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("a")
        git("add", ".")
        git("commit", "-qm", "m")
    tested = git("rev-parse", "HEAD~1").strip()
    (tmp_path / "benchmarks/results/gpu/b.json").write_text("b")
    assert result.commit(tmp_path, None) == (tested, False)
    (tmp_path / "csrc/a.cu").write_text("b")
    assert result.commit(tmp_path, None) == (tested, True)


def test_nothing_is_resumed_where_files_differ_from_the_commit(tmp_path: Path) -> None:
    file = result.ResultFile(tmp_path, FACTS, ("0123456789", False), ["tests"])
    file.begin("tests", ["build"])["build"]["status"] = result.PASSED
    file.write()
    for dirty, expected in ((False, result.PASSED), (True, result.NOT_RUN)):
        again = result.ResultFile(tmp_path, FACTS, ("0123456789", dirty), ["tests"])
        assert again.begin("tests", ["build"])["build"]["status"] == expected
