# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torchfuse.apex`: programs written for apex run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchfuse

pytestmark = pytest.mark.processes

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


def test_the_argument_of_torchs_older_launcher_goes_to_the_program(tmp_path: Path) -> None:
    write(tmp_path / "report.py", "import sys; print(sys.argv)\n")
    for name, target in (("--local-rank", ["report.py"]), ("--local_rank", ["-m", "report"])):
        printed = alias(tmp_path, f"{name}=1", *target, "--flag").stdout
        assert printed.endswith(f"report.py', '{name}=1', '--flag']\n")


def test_a_link_to_a_script_finds_the_modules_beside_the_script(tmp_path: Path) -> None:
    write(tmp_path / "home" / "helper.py", "print('found')\n")
    write(tmp_path / "home" / "script.py", "import helper\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "home" / "script.py")
    assert alias(tmp_path, "link.py").stdout == "found\n"


FAILS = """\
def fail():
    raise ValueError("in the program")

fail()
"""
#: Programs that end with an error or a status of their own, and what python prints last.
ENDS = {
    FAILS: "ValueError: in the program\n",
    "x = 1\nx = = 2\n": "SyntaxError: invalid syntax\n",
    "raise SystemExit\n": "",
    "raise SystemExit('a message')\n": "a message\n",
    "import os; os._exit(9)\n": "",
    "raise KeyboardInterrupt\n": "KeyboardInterrupt\n",
    "import sys\nsys.excepthook = lambda kind, *rest: print(kind)\nraise ValueError\n": "",
}


@pytest.mark.parametrize("program", ENDS)
def test_the_program_ends_as_under_python(program: str, tmp_path: Path) -> None:
    write(tmp_path / "ends.py", program)
    plain = run(tmp_path, "ends.py")
    for command in (("ends.py",), ("-m", "ends")) if program == FAILS else (("ends.py",),):
        aliased = alias(tmp_path, *command)
        assert (aliased.returncode, aliased.stdout) == (plain.returncode, plain.stdout)
        assert aliased.stderr.endswith(ENDS[program])
        assert aliased.stderr == plain.stderr or "KeyboardInterrupt" in program
    assert plain.stderr.endswith(ENDS[program])


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
        ("sys.exit(0)", 0, 1),
        ("import atexit; atexit.register(leave)", 0, 1),  # the program itself
        ("sys.exit(3)", 3, 0),  # it failed, and waits for nobody
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
    ("target", "method"), [(("-m", "spawns"), "spawn"), (("spawns.py",), "forkserver")]
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
        (("--help",), 0, "usage: python -m torchfuse.apex script.py"),
        ((), 2, "usage: python -m torchfuse.apex script.py"),
        (("-m",), 2, "usage: python -m torchfuse.apex script.py"),
        (("--fast", "script.py"), 2, "usage: python -m torchfuse.apex script.py"),
        (("--local-rank=1",), 2, "usage: python -m torchfuse.apex script.py"),
        (("missing.py",), 2, "torchfuse.apex: expected a Python file, got 'missing.py'."),
        (("-m", "no_such_module"), 1, "No module named no_such_module"),
    ],
)
def test_command_lines_without_a_program(
    arguments: tuple[str, ...], status: int, message: str, tmp_path: Path
) -> None:
    result = alias(tmp_path, *arguments)
    told, silent = (result.stderr, result.stdout) if status else (result.stdout, result.stderr)
    assert (result.returncode, silent) == (status, "")
    assert message in told
    assert "Traceback" not in told
