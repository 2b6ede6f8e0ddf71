# SPDX-License-Identifier: BSD-3-Clause
"""The image classifier in C++: the Python program's losses, resuming, and several processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cmake_project import ROOT, environment, run, run_in_processes

EXAMPLES = ROOT / "examples/python"


@pytest.fixture(scope="module")
def program(example: Callable[[str], Path]) -> Path:
    return example("train_images")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    run(sys.executable, EXAMPLES / "image_folder.py", folder)
    return folder


def result(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read


def train(program: Path, data: Path, out: Path, name: str, *options: str) -> dict[str, Any]:
    options = ("--name", name, "--device", "cpu", *options)
    run(program, data, out, *options, env=environment(OMP_NUM_THREADS="1"))
    return result(out / f"{name}.json")


def test_losses_are_those_of_the_python_program(program: Path, data: Path, tmp_path: Path) -> None:
    common = ("--epochs", "2", "--stop-after", "1", "--device", "cpu", "--name")
    script = EXAMPLES / "train_images.py"
    alone = environment(OMP_NUM_THREADS="1")
    run(sys.executable, script, data, "--out", tmp_path, *common, "python", env=alone)
    cpp = train(program, data, tmp_path, "cpp", "--epochs", "2", "--stop-after", "1")
    run_in_processes(2, "--no-python", program, data, tmp_path, *common, "two")
    expected = result(tmp_path / "python.json")["losses"]
    assert len(expected) == 22
    assert cpp["losses"] == expected
    # Sums over two processes have another order. What differs by roundings at first may differ by
    # more once an activation has another sign.
    two = result(tmp_path / "two.json")["losses"]
    assert two[:12] == pytest.approx(expected[:12], rel=1e-5)
    assert two == pytest.approx(expected, rel=2e-2)
    assert cpp["language"] == "C++"
    # Python goes on from its checkpoint.
    options = ("--epochs", "2", "--device", "cpu", "--name", "cpp", "--resume")
    run(sys.executable, script, data, "--out", tmp_path, *options)
    resumed = result(tmp_path / "cpp.json")
    assert resumed["losses"][:22] == cpp["losses"]
    assert len(resumed["losses"]) == 44


def test_a_run_in_parts_is_the_whole_run_and_learns(
    program: Path, data: Path, tmp_path: Path
) -> None:
    whole = train(program, data, tmp_path, "whole", "--epochs", "4", "--workers", "0")
    first = train(program, data, tmp_path, "parts", "--epochs", "4", "--stop-after", "1")
    rest = train(program, data, tmp_path, "parts", "--epochs", "4", "--resume")
    assert first["losses"] == whole["losses"][:22]
    assert rest["losses"] == whole["losses"]
    assert rest["accuracies"] == whole["accuracies"]
    options = ("--name", "parts", "--device", "cpu", "--epochs", "4", "--resume")
    assert "has 4 epochs already" in run(program, data, tmp_path, *options, ok=False)
    assert result(tmp_path / "parts.json") == rest
    assert whole["losses"][-1] < 0.2 * whole["losses"][0]
    assert whole["accuracies"][-1] > 0.9
    parts, expected = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"]
        for name in ("parts", "whole")
    )
    assert all(torch.equal(parts[name], expected[name]) for name in expected)
    assert (tmp_path / "parts.safetensors").read_bytes() == (
        tmp_path / "whole.safetensors"
    ).read_bytes()
    for file in tmp_path.glob("*.json"):
        memory = result(file)["memory_mib"]
        assert 0 < memory["used"] < memory["total"]
