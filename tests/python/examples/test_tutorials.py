# SPDX-License-Identifier: BSD-3-Clause
"""The tutorials run, and what they print is what their pages say."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"
PNG = b"\x89PNG\r\n\x1a\n"
# What differs between a program for torchfuse and one for torch.
IMPORTS = {
    "from torchfuse import clip_grad_norm_": "from torch.nn.utils import clip_grad_norm_",
    "from torchfuse.amp import GradScaler": "from torch.amp import GradScaler",
    "from torchfuse.optimizers import FusedAdam as AdamW": "from torch.optim import AdamW",
}


class Program:
    """Runs tutorials in this process, in their quick mode, and keeps what they print."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        monkeypatch.syspath_prepend(str(EXAMPLES))

    def __call__(self, script: Path, *options: str) -> str:
        arguments = [str(script), "--out", str(self.folder), "--quick", "--device", "cpu", *options]
        self._monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        printed = self._capsys.readouterr().out
        assert ended.value.code == 0, printed
        for name in re.findall(r"^wrote (.*\.png)$", printed, re.MULTILINE):
            assert Path(name).read_bytes().startswith(PNG)
        return printed


@pytest.fixture
def program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Program:
    return Program(tmp_path, monkeypatch, capsys)


def row(printed: str, name: str) -> list[float]:
    """The numbers of the table's row that begins with `name`."""
    (line,) = re.findall(rf"^ *{re.escape(name)} (.*)$", printed, re.MULTILINE)
    return [float(number.replace(",", "")) for number in re.findall(r"[\d.,]*\d", line)]


def accuracy(printed: str) -> float:
    (percent,) = re.findall(r"^test accuracy: ([\d.]+)%$", printed, re.MULTILINE)
    return float(percent)


def losses(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with (folder / "losses.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return tuple(  # type: ignore[return-value]
        torch.tensor([float(entry[column]) for entry in rows], dtype=torch.float64)
        for column in ("loss", "scale")
    )


def test_the_loop_resumes_to_the_bit_and_agrees_with_torch_when_imports_are_swapped(
    program: Program, tmp_path: Path
) -> None:
    script = EXAMPLES / "mixed_precision_loop.py"
    ours = program(script)
    our_losses, our_scales = losses(tmp_path)

    source = script.read_text(encoding="utf-8")
    for line, replacement in IMPORTS.items():
        assert source.count(f"\n{line}\n") == 1
        assert f"    {replacement}\n" in source  # as its docstring says
        source = source.replace(f"\n{line}\n", f"\n{replacement}\n")
    assert "torchfuse" not in source.partition('"""\n\nfrom __future__')[2]
    swapped = tmp_path / "with_torch.py"
    swapped.write_text(source, encoding="utf-8")
    theirs = program(swapped)
    torch_losses, torch_scales = losses(tmp_path)

    for printed in (ours, theirs):
        assert (
            "resumed at step 60: weights, states, scale and losses identical to the bit" in printed
        )
    assert len(our_losses) == 120
    # Rounding differs in the last bit and grows from step to step.
    torch.testing.assert_close(our_losses[:20], torch_losses[:20], rtol=1e-3, atol=0)
    torch.testing.assert_close(our_losses, torch_losses, rtol=0.1, atol=0.02)
    assert torch.equal(our_scales, torch_scales)
    assert len(our_scales.unique()) > 1  # the scale grew on the way
    assert accuracy(ours) == pytest.approx(accuracy(theirs), abs=1.0)


def test_without_scaling_all_gradients_are_zero_and_with_it_the_network_learns(
    program: Program,
) -> None:
    printed = program(EXAMPLES / "why_loss_scaling.py")
    whole, unscaled, scaled = (
        row(printed, name) for name in ("fp32", "fp16 without scaling", "fp16 with GradScaler")
    )
    assert unscaled[0] == 100.0
    assert scaled[0] == pytest.approx(whole[0], abs=2.0)
    assert scaled[0] < 50.0
    assert unscaled[2] < 20.0  # as good as guessing
    assert scaled[2] == pytest.approx(whole[2], abs=2.0)
    assert scaled[2] > 80.0


def test_weights_of_16_bits_stand_still_without_masters(program: Program) -> None:
    printed = program(EXAMPLES / "why_master_weights.py")
    whole, alone, masters, stochastic = (
        row(printed, name)
        for name in ("fp32", "bf16 alone", "bf16, fp32 masters", "bf16, stochastic rounding")
    )
    assert alone[1] > 50.0  # percent of the weights never moved
    for kept in (masters, stochastic):
        assert kept[0] == pytest.approx(whole[0], rel=0.02)
        assert kept[1] < 10.0
        assert kept[2] == pytest.approx(whole[2], rel=0.02)
    assert alone[0] < 0.5 * whole[0]
    assert alone[2] > 1.05 * whole[2]


def peak_memory(printed: str, batch: int = 8192) -> dict[tuple[int, str], float]:
    """MiB by width and precision, once each row has been checked by itself."""
    memory: dict[tuple[int, str], float] = {}
    pattern = r"^ *(\d+) +([\d,]+) +(fp32|bf16|fp16) +([\d.]+) ms +[\d.]+x +([\d.]+) MiB +\d+%$"
    for width, parameters, mode, step_ms, peak_mib in re.findall(pattern, printed, re.MULTILINE):
        assert float(step_ms) > 0.0
        memory[int(width), mode] = float(peak_mib)
        # Weights, gradients and two moments in fp32, and one activation of each layer in 16 bits.
        needed = 16 * int(parameters.replace(",", "")) + 8 * batch * int(width) * 2
        assert float(peak_mib) > needed / 2**20
    assert sorted(memory) == [(w, mode) for w in (32, 128) for mode in ("bf16", "fp16", "fp32")]
    return memory


def test_time_and_memory_are_reported_for_every_size_and_precision(
    program: Program, tmp_path: Path
) -> None:
    memory = peak_memory(program(EXAMPLES / "precision_and_size.py"))
    assert memory[128, "fp32"] > memory[32, "fp32"]
    for name in ("time_per_step.png", "peak_memory.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


@pytest.mark.cuda
def test_mixed_precision_needs_less_memory_on_cuda(program: Program, tmp_path: Path) -> None:
    source = (EXAMPLES / "precision_and_size.py").read_text(encoding="utf-8")
    assert source.count("BATCH = 8192 ") == 1
    smaller = tmp_path / "smaller.py"
    smaller.write_text(source.replace("BATCH = 8192 ", "BATCH = 1024 "), encoding="utf-8")
    memory = peak_memory(program(smaller, "--device", "cuda"), 1024)
    for mode in ("bf16", "fp16"):
        assert memory[128, mode] < memory[128, "fp32"]


def test_the_history_shows_every_growth_and_every_skip(program: Program, tmp_path: Path) -> None:
    printed = program(EXAMPLES / "loss_scale_history.py")
    with (tmp_path / "loss_scale.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    scales = [float(entry["scale"]) for entry in rows]
    skipped = [entry["skipped"] == "True" for entry in rows]
    assert len(rows) == 120
    assert f"steps: 120, skipped: {sum(skipped)}" in printed
    assert sum(skipped) >= 2
    # A skip halves the scale of the next step; 25 steps without one double it.
    clean = 0
    for index, skip in enumerate(skipped[:-1]):
        clean = 0 if skip else clean + 1
        factor = 0.5 if skip else 2.0 if clean == 25 else 1.0
        clean = 0 if clean == 25 else clean
        assert scales[index + 1] == factor * scales[index]
    assert max(scales) > min(scales)
    assert accuracy(printed) > 80.0
