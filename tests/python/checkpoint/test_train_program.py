# SPDX-License-Identifier: BSD-3-Clause
"""Runs that change their language on the way, and a program that is killed while it saves.

The C++ program is tests/cpp/api/checkpoint/train_program.cpp.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpp_programs import cpp_program
from torch import Tensor, nn

import torchfuse
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)
MODES = ("fp32", "master", "remainder")

#: How often the program is killed; TORCHFUSE_KILLS=200 for the long proof.
KILLS = int(os.environ.get("TORCHFUSE_KILLS", "25"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.bn = nn.BatchNorm1d(3)
        self.fc2 = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.bn(self.fc1(x)))


class Position:
    """The sampler's part of the C++ program."""

    def __init__(self) -> None:
        self.state = {"epoch": 0, "position": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def run_cpp(mode: str, first: int, last: int, source: Path | str, target: Path) -> list[str]:
    command = cpp_program("train", mode, first, last, source, target)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_python(mode: str, first: int, last: int, source: Path, target: Path) -> None:
    torch.manual_seed(77)
    model = Net().to(torch.float32 if mode == "fp32" else torch.bfloat16)
    optimizer = FusedAdam(
        model.parameters(),
        lr=9.0,
        master_weights=mode != "fp32",
        store_param_remainders=mode == "remainder",
    )
    scaler, position = GradScaler("cpu"), Position()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "scheduler": scheduler,
        "sampler": position,
    }
    values = torchfuse.load_checkpoint(source, rng=True, **parts)
    assert values["step"] == first
    for _ in range(first, last):
        optimizer.zero_grad()
        x = torch.randn(5, 4).to(model.fc1.weight.dtype)
        scaler.scale(model(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        position.state["position"] += 2
    torchfuse.save_checkpoint(target, rng=True, values={**values, "step": last}, **parts)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_may_change_its_language(tmp_path: Path, mode: str) -> None:
    """Parameters, statistics, states, scale, counts and random numbers, bit for bit."""
    whole, half, python, back = (tmp_path / name for name in ("whole", "half", "python", "back"))
    order = run_cpp(mode, 0, 8, "-", whole)
    first = run_cpp(mode, 0, 3, "-", half)
    run_python(mode, 3, 6, half, python)
    last = run_cpp(mode, 6, 8, python, back)
    assert first + last == order[:3] + order[6:]  # the samples of the epoch go on
    expected = torch.load(whole, weights_only=True)
    found = torch.load(back, weights_only=True)
    assert list(expected["model"]) == list(Net().state_dict())
    assert expected["sampler"] == {"epoch": 2, "position": 16}
    # Python's scaler names this tracker if there is a hysteresis alone.
    assert expected["scaler"].pop("_hysteresis_tracker") == 1
    assert found["scaler"].pop("_hysteresis_tracker", 1) == 1
    for part in ("torchfuse", "values"):
        assert found.pop(part) == expected[part]
    assert_same(found, {part: expected[part] for part in found})
    # The states in Python are those of C++ too, and not only after a step there.
    run_python(mode, 8, 8, whole, python)
    again = torch.load(python, weights_only=True)
    assert again["values"] == expected["values"]
    for part in ("model", "scaler", "rng", "sampler"):
        assert_same(again[part], expected[part])
    assert_same(again["optimizer"]["state"], expected["optimizer"]["state"])


def refusal_of_cpp(path: Path) -> str:
    command = cpp_program("train", "fp32", 0, 1, path, path.with_suffix(".out"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert not path.with_suffix(".out").exists()
    return done.stderr


def test_cpp_runs_nothing_that_a_file_names(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save({"model": Net(), "torchfuse": {"format": 1}}, path)
    message = refusal_of_cpp(path)
    assert message.startswith(
        f"error: load_checkpoint: expected {path} to hold plain values and dense"
    )
    assert "Net. No code from the file was run." in message
    torch.save({"torchfuse": {1.5: 1}}, path)
    assert "to hold dicts with strings or ints as keys, got a float" in refusal_of_cpp(path)
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    torch.save({"torchfuse": nested}, path)
    assert "to hold values nested less deeply" in refusal_of_cpp(path)
    cycle: list[Any] = []
    cycle.append(cycle)
    torch.save({"torchfuse": cycle}, path)
    assert "to hold no value that holds itself" in refusal_of_cpp(path)


def test_cpp_reads_what_schedulers_and_views_save(tmp_path: Path) -> None:
    """Counters, ordered dictionaries with attributes, shared storages, parameters and dtypes."""
    path = tmp_path / "last.pt"
    run_cpp("fp32", 0, 1, "-", path)
    contents = torch.load(path, weights_only=True)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    storage = torch.arange(40.0)
    more = {
        "milestones": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]).state_dict(),
        "state_dict": Net().state_dict(),
        "views": [storage[3:], storage[::2], storage.view(8, 5).t(), torch.empty(0, 3)],
        "parameter": nn.Parameter(torch.ones(2)),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "numbers": [0, 255, 65535, -1, 2**31, -(2**63), 2**63 - 1, float("inf")],
    }
    torch.save({**contents, **more}, path)
    assert len(run_cpp("fp32", 1, 2, path, tmp_path / "next.pt")) == 1


@contextmanager
def saving(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that saves again and again, from its first file on; it ends with the block."""
    program = subprocess.Popen(cpp_program("train", "loop", path), stdout=subprocess.PIPE)
    try:
        started, _, _ = select.select([program.stdout], [], [], 120.0)
        assert started, "the program has saved nothing within 120 s"
        assert program.stdout.readline() == b"ready\n"
        yield program
    finally:
        program.kill()
        program.communicate()


def test_a_killed_save_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    seed = random.Random(5)
    latest = 0
    left_behind = 0
    for _ in range(KILLS):
        with saving(path) as program:
            time.sleep(seed.uniform(0.0, 0.05))
            program.send_signal(signal.SIGKILL)
            assert program.wait() == -signal.SIGKILL
        values = torchfuse.load_checkpoint(path)
        assert torch.equal(values["tensor"], torch.full((200_000,), values["number"]))
        latest = max(latest, values["number"])
        for stray in tmp_path.glob("last.pt.tmp-*"):
            left_behind += 1
            stray.unlink()
    assert latest > 1
    assert left_behind > 0  # or no save was cut


def test_two_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with saving(path), saving(path):
        for _ in range(20):
            values = torchfuse.load_checkpoint(path)
            assert torch.equal(values["tensor"], torch.full((200_000,), values["number"]))
