# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torchfuse.apex`: programs written for apex run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchfuse

pytestmark = pytest.mark.processes

PROGRAMS = Path(__file__).resolve().parent / "programs"
PACKAGES = str(Path(torchfuse.__file__).resolve().parent.parent)


def run(
    folder: Path, *arguments: str, python_path: str = PACKAGES
) -> subprocess.CompletedProcess[str]:
    """Runs python in `folder`."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": python_path},
    )


def alias(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "torchfuse.apex", *arguments)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


# Training.


@pytest.mark.parametrize("optimizer", ["adam", "larc"])
def test_a_training_program_runs_unmodified_and_resumes(optimizer: str, tmp_path: Path) -> None:
    program = str(PROGRAMS / "train.py")
    options = ("--optimizer", optimizer, "--checkpoint")
    whole = alias(tmp_path, program, *options, "whole.pt", "--epochs", "4")
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr == ""
    lines = whole.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    halves = [alias(tmp_path, program, *options, "half.pt", "--epochs", n) for n in ("2", "4")]
    assert [half.returncode for half in halves] == [0, 0], halves[1].stderr
    assert halves[0].stdout + halves[1].stdout == whole.stdout
    # The checkpoint holds tensors and numbers only, in torch's layout.
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(saved["optimizer"]) == {"state", "param_groups"}


def test_the_program_needs_the_alias(tmp_path: Path) -> None:
    result = run(tmp_path, str(PROGRAMS / "train.py"))
    assert result.returncode == 1
    assert "No module named 'apex'" in result.stderr


# As under python itself.

REPORT = """\
import json, os, pickle, sys
class Here: pass
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "loader": type(__loader__).__name__, "package": __package__,
    "spec": None if __spec__ is None else __spec__.name,
    "pickles": isinstance(pickle.loads(pickle.dumps(Here())), Here),
}))
import helper
raise SystemExit(helper.STATUS)
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_the_program_sees_what_it_would_see_under_python(as_module: bool, tmp_path: Path) -> None:
    home = tmp_path / "programs"
    write(home / "report.py", REPORT)
    write((tmp_path if as_module else home) / "helper.py", "STATUS = 7\n")
    target = ("-m", "programs.report") if as_module else ("programs/report.py",)
    command = (*target, "--flag", "-m", "x y")
    plain, aliased = run(tmp_path, *command), alias(tmp_path, *command)
    assert plain.returncode == aliased.returncode == 7
    seen = json.loads(aliased.stdout)
    assert seen == json.loads(plain.stdout)
    assert seen["argv"][1:] == ["--flag", "-m", "x y"]
    assert seen["main"]
    assert seen["name"] == "__main__"


@pytest.mark.parametrize("name", ["--local-rank", "--local_rank"])
def test_the_argument_of_torchs_older_launcher_goes_to_the_program(
    name: str, tmp_path: Path
) -> None:
    write(tmp_path / "report.py", "import sys; print(sys.argv)\n")
    for target in (["report.py"], ["-m", "report"]):
        printed = alias(tmp_path, f"{name}=1", *target, "--flag").stdout
        assert printed.endswith(f"report.py', '{name}=1', '--flag']\n")
    assert alias(tmp_path, f"{name}=1").returncode == 2


def test_a_link_to_a_script_finds_the_modules_beside_the_script(tmp_path: Path) -> None:
    write(tmp_path / "home" / "helper.py", "print('found')\n")
    write(tmp_path / "home" / "script.py", "import helper\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "home" / "script.py")
    assert alias(tmp_path, "link.py").stdout == "found\n"


FAILS = """\
import apex

def fail():
    raise ValueError("in the program")

fail()
"""


def test_a_traceback_is_the_programs_own(tmp_path: Path) -> None:
    write(tmp_path / "fails.py", FAILS)
    # Without apex, the same program under python itself.
    write(tmp_path / "plain" / "fails.py", FAILS.replace("import apex", ""))
    plain = run(tmp_path / "plain", "fails.py")
    for command in (("fails.py",), ("-m", "fails")):
        aliased = alias(tmp_path, *command)
        assert aliased.returncode == plain.returncode == 1
        assert aliased.stderr == plain.stderr.replace("/plain/", "/")
    assert "torchfuse" not in plain.stderr


def test_the_programs_own_excepthook_is_called(tmp_path: Path) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, error, _: print(kind.__name__, error)\n"
    write(tmp_path / "hooked.py", hook + "raise ValueError(3)\n")
    result = alias(tmp_path, "hooked.py")
    assert (result.returncode, result.stdout, result.stderr) == (1, "ValueError 3\n", "")


def test_a_syntax_error_is_shown_in_its_place(tmp_path: Path) -> None:
    write(tmp_path / "broken.py", "x = 1\nx = = 2\n")
    result = alias(tmp_path, "broken.py")
    assert result.returncode == 1
    assert result.stderr == run(tmp_path, "broken.py").stderr
    assert "line 2" in result.stderr


@pytest.mark.parametrize(
    ("statement", "status", "message"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('a message')", 1, "a message\n"),
        ("import os; os._exit(9)", 9, ""),
    ],
)
def test_exit_status(statement: str, status: int, message: str, tmp_path: Path) -> None:
    write(tmp_path / "ends.py", statement + "\n")
    result = alias(tmp_path, "ends.py")
    assert (result.returncode, result.stderr) == (status, message)


def test_an_interrupted_program_ends_by_the_signal(tmp_path: Path) -> None:
    write(tmp_path / "interrupted.py", "raise KeyboardInterrupt\n")
    result = alias(tmp_path, "interrupted.py")
    assert result.returncode == run(tmp_path, "interrupted.py").returncode
    assert result.stderr.endswith("KeyboardInterrupt\n")


# A process group that the program has not left.

LEAVES = """\
import sys
import torch.distributed as dist
from apex.optimizers import FusedAdam

destroy = dist.destroy_process_group

def leave():
    print("left")
    destroy()

dist.destroy_process_group = leave
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.mark.parametrize(
    ("last", "status", "left"),
    [
        ("", 0, 1),
        ("sys.exit(0)", 0, 1),
        # The program itself.
        ("leave()", 0, 1),
        ("import atexit; atexit.register(leave)", 0, 1),
        # It failed, and waits for nobody.
        ("sys.exit(3)", 3, 0),
        ("raise ValueError", 1, 0),
    ],
)
def test_a_gloo_group_is_left_once(last: str, status: int, left: int, tmp_path: Path) -> None:
    write(tmp_path / "leaves.py", f"{LEAVES}{last}\n")
    result = alias(tmp_path, "leaves.py")
    assert (result.returncode, result.stdout) == (status, "left\n" * left), result.stderr


# Processes.

SPAWNS = """\
import multiprocessing, os, sys
from apex.optimizers import FusedAdam

context = multiprocessing.get_context(os.environ["START_METHOD"])

def child(queue, deeper):
    if deeper:
        start(queue, False)
    else:
        queue.put((FusedAdam.__module__, sys.argv[1:]))

def start(queue, deeper):
    process = context.Process(target=child, args=(queue, deeper))
    process.start()
    process.join()
    assert process.exitcode == 0

if __name__ == "__main__":
    queue = context.Queue()
    start(queue, True)
    print(queue.get(timeout=60))
"""


@pytest.mark.parametrize(
    ("target", "method"),
    [(("spawns.py",), "spawn"), (("-m", "spawns"), "spawn"), (("spawns.py",), "forkserver")],
)
def test_processes_that_are_started_anew_have_the_alias(
    target: tuple[str, ...], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("START_METHOD", method)
    write(tmp_path / "spawns.py", SPAWNS)
    result = alias(tmp_path, *target, "argument")
    assert result.stderr == ""
    assert result.stdout == "('torchfuse.apex._optimizers', ['argument'])\n"


# Refusals.


def test_a_real_apex_beside_the_program_is_not_hidden(tmp_path: Path) -> None:
    write(tmp_path / "programs" / "apex" / "__init__.py", "")
    write(tmp_path / "programs" / "script.py", "print('ran')\n")
    result = alias(tmp_path, "programs/script.py")
    assert (result.returncode, result.stdout) == (2, "")
    message = "torchfuse.apex.install: expected no apex to be installed, got one at "
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "usage: python -m torchfuse.apex script.py"),
        (("-m",), 2, "usage: python -m torchfuse.apex script.py"),
        (("--fast", "script.py"), 2, "usage: python -m torchfuse.apex script.py"),
        (("missing.py",), 2, "torchfuse.apex: expected a Python file, got 'missing.py'."),
        (("-m", "no_such_module"), 1, "No module named no_such_module"),
    ],
)
def test_command_lines_that_cannot_run(
    arguments: tuple[str, ...], status: int, message: str, tmp_path: Path
) -> None:
    result = alias(tmp_path, *arguments)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_help(tmp_path: Path) -> None:
    result = alias(tmp_path, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: python -m torchfuse.apex script.py")
