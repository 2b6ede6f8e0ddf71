# SPDX-License-Identifier: BSD-3-Clause
"""The small C++ examples, built against the installed package: each trains as it says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cmake_project import ROOT, WORK, configure, environment, run, run_in_processes

PYTHON = ROOT / "examples/python"
Example = Callable[[str], Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    run(sys.executable, PYTHON / "export_digits.py", folder)
    return folder


def losses_in(printed: str, unit: str) -> list[float]:
    return [float(loss) for loss in re.findall(rf"^{unit} \d+: loss ([^,\s]+)", printed, re.M)]


def accuracy_in(printed: str) -> float:
    return float(re.findall(r"accuracy:? ([\d.]+)", printed)[-1])


def test_distributed_digits_trains_as_in_python_and_resumes(
    example: Example, data: Path, tmp_path: Path
) -> None:
    def train(out: Path, processes: int, *options: str) -> list[float]:
        command = ("--no-python", example("distributed_digits"), data, out, *options)
        run_in_processes(processes, *command)
        losses: list[float] = json.loads((out / "losses_cpp.json").read_text())
        return losses

    script = PYTHON / "distributed_digits.py"
    run_in_processes(1, script, "--epochs", "1", "--out", tmp_path / "python")
    expected = json.loads((tmp_path / "python/losses.json").read_text())
    for processes in (1, 2):
        losses = train(tmp_path / str(processes), processes, "--epochs", "1")
        assert len(losses) == len(expected) == 22
        assert losses[:20] == pytest.approx(expected[:20], rel=1e-5)

    bf16 = ("--precision", "bf16")
    whole = train(tmp_path / "whole", 2, *bf16)
    train(tmp_path / "parts", 2, *bf16, "--epochs", "7")
    rest = train(tmp_path / "parts", 2, *bf16, "--resume")
    assert rest == whole[-len(rest) :]
    assert whole[-1] < 0.1 * whole[0]


def test_gradient_accumulation_adds_up_to_one_batch(prefix: Path) -> None:
    """Built as a user builds it: a project of its own, without a precompiled header."""
    build = WORK / "gradient_accumulation"
    folder = prefix / "lib/cmake/torchfuse"
    configure(ROOT / "examples/cpp/gradient_accumulation", build, f"-Dtorchfuse_DIR={folder}")
    run("cmake", "--build", build)

    def train(processes: int, parts: int) -> list[float]:
        program = build / "gradient_accumulation"
        printed = run_in_processes(processes, "--no-python", program, str(parts))
        assert accuracy_in(printed) > 0.9
        return losses_in(printed, "step")

    whole = train(1, 1)
    assert len(whole) == 12
    for processes, parts in ((1, 4), (2, 1), (2, 4)):
        # Sums in fp16 depend on the size of a part, and differences grow.
        assert train(processes, parts)[:5] == pytest.approx(whole[:5], rel=0.02)


def test_several_processes_train_as_in_python(example: Example, tmp_path: Path) -> None:
    def train(processes: int, *command: str | Path) -> list[float]:
        printed = run_in_processes(processes, *command)
        assert accuracy_in(printed) > 0.95
        return losses_in(printed, "epoch")

    program = example("several_processes")
    expected = train(2, PYTHON / "several_processes.py", tmp_path / "python")
    assert len(expected) == 12
    for processes in (1, 2):
        losses = train(processes, "--no-python", program, tmp_path / str(processes))
        assert losses[:5] == pytest.approx(expected[:5], rel=0.01)
    assert "torchrun --no-python" in run(program, tmp_path, env=environment(), ok=False)


def test_the_classic_loop_learns_and_resumes_to_the_bit(example: Example, data: Path) -> None:
    printed = run(example("mixed_precision_loop"), data, "--quick")
    assert "resumed at step 60: weights, scales and losses identical to the bit" in printed
    rows = re.findall(r"^ *(\d+) +([\d.]+) +(\d+)$", printed, re.MULTILINE)
    losses, scales = ([float(row[column]) for row in rows] for column in (1, 2))
    assert losses[-1] < 0.2 * losses[0]
    assert 2.0**16 == scales[0] < scales[-1]
    assert accuracy_in(printed) > 90.0


def tensors_of(value: Any, where: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {where: value}
    if not isinstance(value, (dict, list, tuple)):
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found |= tensors_of(item, f"{where}/{key}")
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_whole_trainer_in_parts_is_the_whole_run(
    example: Example, tmp_path: Path, processes: int
) -> None:
    def train(checkpoint: Path, steps: int) -> list[str]:
        command = ("--no-python", example("whole_trainer"), checkpoint, str(steps))
        return re.findall(r"^(?:step|accuracy) .*$", run_in_processes(processes, *command), re.M)

    whole = train(tmp_path / "whole.pt", 60)
    assert train(tmp_path / "parts.pt", 23)[:-1] + train(tmp_path / "parts.pt", 60) == whole
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", "\n".join(whole))]
    assert len(losses) == 60
    assert losses[-1] < 0.5 * losses[0]
    assert accuracy_in(whole[-1]) > 0.9
    saved, expected = (
        tensors_of(torch.load(tmp_path / name, weights_only=True))
        for name in ("parts.pt", "whole.pt")
    )
    assert [key for key in expected if key.endswith("ema_param")]
    assert [key for key in expected if not torch.equal(saved[key], expected[key])] == []
