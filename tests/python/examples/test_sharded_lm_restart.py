# SPDX-License-Identifier: BSD-3-Clause
"""The language model under torchrun's restarts: the bits of a run that was never interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"
PROGRAM = EXAMPLES / "sharded_lm.py"
DYING = Path(__file__).with_name("dying_sharded_lm.py")
STEPS = 9
SMALL = ["--layers", "2", "--width", "32", "--sequence", "32", "--batch", "8", "--warm-up", "4"]
SMALL += ["--steps", str(STEPS), "--checkpoint-every", "3", "--validation-samples", "16"]
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LOGGED = ("step", "loss", "lr", "grad_norm", "validation_loss")


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in `folder`, to its end."""
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


def torchrun(
    folder: Path, *command: str, restarts: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Two processes that run in `folder`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run(folder, *launcher, "--max-restarts", str(restarts), *command, **variables)


def log(folder: Path) -> list[dict[str, Any]]:
    """What does not depend on the clock, in each record of the log."""
    records = map(json.loads, (folder / "out/log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: record[name] for name in LOGGED if name in record} for record in records]


@pytest.mark.parametrize(
    ("parallel", "deaths", "begins"),
    [
        # In the middle of a checkpoint.
        ("fsdp", "save:6", [(1, 6), (4, STEPS)]),
        # In the middle of a step, before the first checkpoint and after it.
        ("zero", "step:2,step:5", [(1, 2), (1, 5), (4, STEPS)]),
    ],
)
def test_restarts_lead_to_the_bits_of_an_uninterrupted_run(
    parallel: str, deaths: str, begins: list[tuple[int, int]], tmp_path: Path
) -> None:
    options = [*SMALL, "--out", "out", "--parallel", parallel]
    whole = torchrun(tmp_path / "whole", str(PROGRAM), *options)
    assert whole.returncode == 0, whole.stdout
    program = [str(DYING), deaths, *options, "--resume-or-begin"]
    restarted = torchrun(tmp_path / "restarted", *program, restarts=2, **FRESH_STORE)
    assert restarted.returncode == 0, restarted.stdout

    batches = (tmp_path / "restarted/batches").read_text(encoding="utf-8").split()
    assert list(map(int, batches)) == [
        step for first, last in begins for step in range(first, last + 1)
    ]
    expected = log(tmp_path / "whole")
    assert [record["step"] for record in expected if "loss" in record] == [*range(1, STEPS + 1)]
    assert log(tmp_path / "restarted") == expected
    assert (tmp_path / "restarted/out/loss.svg").exists()


def test_a_run_that_is_done_when_it_restarts_ends_well(tmp_path: Path) -> None:
    """A process may die between the last checkpoint and the end."""
    command = [str(PROGRAM), *SMALL, "--steps", "2", "--out", "out"]
    first = run(tmp_path, *command)
    assert first.returncode == 0, first.stdout
    before = log(tmp_path)
    again = run(tmp_path, *command, "--resume-or-begin")
    assert again.returncode == 0, again.stdout
    assert "after step 2" in again.stdout
    assert log(tmp_path) == before
    refused = run(tmp_path, *command, "--resume")
    assert refused.returncode != 0
    assert "has 2 steps already" in refused.stdout


def test_folders_that_processes_do_not_share_are_refused(tmp_path: Path) -> None:
    """As those of two machines, of which no checkpoint would have all parts."""
    command = 'mkdir "$RANK" && cd "$RANK" && exec "$@"'
    program = [sys.executable, str(PROGRAM), *SMALL, "--out", "out"]
    done = torchrun(tmp_path, "--no-python", "bash", "-c", command, "bash", *program)
    assert done.returncode != 0
    said = "expected --out to be one folder for all 2 processes, got out/model.json of rank 0 in 1"
    assert done.stdout.count(said) == 2, done.stdout
    assert not (tmp_path / "0/out/checkpoints").exists()


def test_a_store_that_keeps_addresses_of_the_dead_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from sharded_lm_arguments import parse_arguments

    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--out", str(tmp_path), "--resume-or-begin"])
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert parse_arguments("A program.", ("bf16",)).resume_or_begin
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(SystemExit):
        parse_arguments("A program.", ("bf16",))
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err


def test_a_log_that_broke_off_in_a_line_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import sharded_lm_report

    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step}) for step in range(4)]
    path.write_text("\n".join(lines) + '\n{"step": 4, "lo', encoding="utf-8")
    log = sharded_lm_report.Log(path, begin=2)
    log.write({"step": 3})
    assert [record["step"] for record in sharded_lm_report.read(path)] == [0, 1, 2, 3]
    log.close()
