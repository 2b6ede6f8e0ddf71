# SPDX-License-Identifier: BSD-3-Clause
"""Each example program runs to its end and says what it has found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.torchrun import torchrun

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "python"
QUICK = ("--out", "{}", "--quick", "--device", "cpu")
SMALL = ("--layers", "2", "--width", "32", "--sequence", "32", "--batch", "8", "--steps", "4")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(program: Path, *arguments: object) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, str(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("mixed_precision_loop.py", "scale and losses identical to the bit"),
        ("why_loss_scaling.py", "fp16 with GradScaler"),
        ("why_master_weights.py", "bf16, stochastic rounding"),
        ("precision_and_size.py", "peak_memory.png"),
        ("loss_scale_history.py", "steps: 120, skipped: "),
    ],
)
def test_tutorials(program: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    assert said in run(EXAMPLES / program, *(option.format(tmp_path) for option in QUICK))


def test_the_shortest_loop() -> None:
    run(ROOT / "docs/examples/shortest_loop.py")


def test_images_are_made_learned_and_reported(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    data, out = tmp_path / "data", tmp_path / "out"
    assert "1437 images in" in run(EXAMPLES / "image_folder.py", data)
    options = ("--out", out, "--device", "cpu", "--epochs", 1)
    assert "%|" not in run(EXAMPLES / "train_images.py", data, *options), "a progress bar"
    assert "Python" in run(EXAMPLES / "image_report.py", out)


@pytest.mark.parametrize(
    ("program", "options", "said"),
    [
        ("several_processes.py", ("{}",), "epoch 11: loss"),
        ("zero.py", ("{}/new/checkpoint",), "after step 40: loss"),
        ("fsdp2.py", ("{}/new/checkpoint",), "after step 40: loss"),
        ("pipeline_norms.py", (), "norm of both stages"),
        ("distributed_digits.py", ("--out", "{}", "--epochs", "1"), "test accuracy: "),
        ("sharded_lm.py", ("--out", "{}", *SMALL), "tokens per second"),
    ],
)
def test_programs_of_two_processes(
    program: str, options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    for module in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(module)
    arguments = [option.format(tmp_path) for option in options]
    outcome = torchrun(2, [sys.executable, str(EXAMPLES / program), *arguments])
    assert outcome.status == 0, outcome.output
    assert said in outcome.output
