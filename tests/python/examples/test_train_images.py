# SPDX-License-Identifier: BSD-3-Clause
"""The image classifier: alone, resumed and in two processes; and the report over its results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"
PNG = b"\x89PNG\r\n\x1a\n"


def run(script: str, *arguments: object, launcher: tuple[str, ...] = (), ok: bool = True) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    assert "1437 images in" in run("image_folder.py", folder)
    return folder


def result(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read


@pytest.mark.processes
def test_a_run_in_parts_is_the_whole_run_and_learns(data: Path, tmp_path: Path) -> None:
    common = (data, "--out", tmp_path, "--device", "cpu", "--epochs", 4)
    printed = run("train_images.py", *common, "--name", "whole", "--workers", 0)
    assert "%|" not in printed, "a progress bar where there is no terminal"
    run("train_images.py", *common, "--name", "parts", "--stop-after", 1)
    first = result(tmp_path / "parts.json")
    run("train_images.py", *common, "--name", "parts", "--resume")
    rest = result(tmp_path / "parts.json")
    whole = result(tmp_path / "whole.json")
    assert first["losses"] == whole["losses"][:22]
    assert rest["losses"] == whole["losses"]
    assert rest["accuracies"] == whole["accuracies"]
    printed = run("train_images.py", *common, "--name", "parts", "--resume", ok=False)
    assert "has 4 epochs already, and 4 are asked for" in printed
    assert result(tmp_path / "parts.json") == rest
    assert len(whole["losses"]) == 4 * 22
    assert whole["losses"][-1] < 0.2 * whole["losses"][0]
    assert whole["accuracies"][-1] > 0.9
    assert (tmp_path / "whole.png").read_bytes().startswith(PNG)
    parts, expected = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"]
        for name in ("parts", "whole")
    )
    assert all(torch.equal(parts[name], expected[name]) for name in expected)
    assert (tmp_path / "parts.safetensors").read_bytes() == (
        tmp_path / "whole.safetensors"
    ).read_bytes()


@pytest.mark.processes
def test_two_processes_train_as_one(data: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    common = (data, "--out", tmp_path, "--device", "cpu", "--epochs", 2, "--stop-after", 1)
    run("train_images.py", *common, "--name", "one")
    run("train_images.py", *common, "--name", "two", launcher=launcher)
    one, two = (result(tmp_path / f"{name}.json")["losses"] for name in ("one", "two"))
    assert len(one) == len(two) == 22
    # As in tests/packaging/cpp/test_train_images.py.
    assert two[:12] == pytest.approx(one[:12], rel=1e-5)
    assert two == pytest.approx(one, rel=2e-2)


def write_run(file: Path, device: str, precision: str, seconds: float, used: float) -> None:
    run = {
        "language": "Python",
        "device": device,
        "precision": precision,
        "losses": [2.0, 1.0],
        "accuracies": [0.5, 0.75],
        "step_seconds": [9.0] * 5 + [seconds] * 4,
        "memory_mib": {"used": used, "free": 100.0, "total": 1000.0},
    }
    file.write_text(json.dumps(run), encoding="utf-8")


def test_the_report_has_one_row_per_device_and_precision(tmp_path: Path) -> None:
    for number, seconds in enumerate((0.5, 0.25, 0.2)):
        write_run(tmp_path / f"{number}.json", "CPU", "fp32", seconds, used=10 * number)
    write_run(tmp_path / "half.json", "CPU", "bf16", 0.125, used=50)
    write_run(tmp_path / "gpu.json", "Some GPU", "fp16", 0.01, used=70)
    rows = [
        re.split(r"  +", line.strip())
        for line in run("image_report.py", tmp_path).splitlines()
        if "Python" in line
    ]
    assert rows == [
        ["CPU", "fp32", "Python", "3", "10", "100", "1000", "4.00", "75.00%"],
        ["CPU", "bf16", "Python", "1", "50", "100", "1000", "8.00", "75.00%"],
        ["Some GPU", "fp16", "Python", "1", "70", "100", "1000", "100.00", "75.00%"],
    ]
    assert (tmp_path / "report.png").read_bytes().startswith(PNG)


def test_without_files_the_programs_say_what_they_expect(tmp_path: Path) -> None:
    assert "expected result files" in run("image_report.py", tmp_path, ok=False)
    assert "expected images <label>/<name>.pgm" in run("train_images.py", tmp_path, ok=False)


def test_random_numbers_are_those_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import image_folder

    # Steele, Lea and Flood 2014: the first numbers of splitmix64 from the state 0.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [image_folder.random_bits(0, 0, index) for index in range(3)] == known
    assert image_folder.random_bits(0, 1, 0) != image_folder.random_bits(1, 0, 0)
    image = 50 * torch.arange(6.0).view(1, 2, 3)
    # Down and right by the two lowest draws; 1 is no move, and 0x8000 of 0xFFFF nearly no change.
    assert torch.allclose(image_folder.augment(image, 0x80000101), image, rtol=1e-5)
    moved = image_folder.augment(image, 0xFFFF0200)
    # Two rows were black and (0, 50, 100): down by one, left by one, a fifth brighter.
    assert moved.round().tolist() == [[[0, 0, 0], [60, 120, 0]]]
    assert image_folder.augment(image, 0xFFFF0101)[0, 1, 2] == 255
