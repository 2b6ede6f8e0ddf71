# SPDX-License-Identifier: BSD-3-Clause
"""Predictions follow from bytes, recorded registers and launches, as their page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpu_predictions as predictions
import gpu_result
from gpu_predictions import LAUNCH, Pass, Prediction
from suites import gpu

GB = 1e9


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels of 64 and 128 registers on sm_90, and others elsewhere."""
    kernels = {
        "small": {"registers": [255, 64], "text": [0, 0], "loads": 0, "stores": 0},
        "large": {"registers": [255, 128], "text": [0, 0], "loads": 0, "stores": 0},
    }
    path = tmp_path / "budget.json"
    path.write_text(json.dumps({"architectures": [80, 90], "kernels": kernels}))
    monkeypatch.setattr(predictions, "BUDGET", path)
    monkeypatch.setattr(predictions, "COPY", {"H100": 100 * GB, "H200": 200 * GB})


def test_loads_in_flight_follow_from_registers() -> None:
    # 65,536 registers are 4 blocks of 256 threads with 64 registers each.
    assert predictions.in_flight(Pass("small", 28, 4)) == 4 * 256 * 4 * 16
    assert predictions.in_flight(Pass("large", 28, 4)) == 2 * 256 * 4 * 16


def test_a_grid_of_few_blocks_has_less_in_flight() -> None:
    assert predictions.in_flight(Pass("small", 28, 4, blocks=1.5)) == 1.5 * 256 * 4 * 16
    assert predictions.in_flight(Pass("small", 28, 4, blocks=9)) == 4 * 256 * 4 * 16


def test_a_kernel_with_too_few_loads_in_flight_reaches_less() -> None:
    assert predictions.share(Pass("small", 28, 4)) == predictions.BEST_SHARE
    # 12 of 48 KB.
    quarter = Pass("small", 28, 4, blocks=0.75)
    assert predictions.share(quarter) == pytest.approx(predictions.BEST_SHARE / 2)


def test_passes_add_up_with_their_launches() -> None:
    step = Prediction("step", 1e9, (Pass("small", 4, 4), Pass("small", 28, 4)), "peer", 48, 5)
    stream = 32 / (predictions.BEST_SHARE * 100)
    assert predictions.seconds(step, "H100") == pytest.approx(stream + 2 * LAUNCH)
    assert predictions.seconds(step, "H200") == pytest.approx(stream / 2 + 2 * LAUNCH)
    peer = 48 / (predictions.PEER_SHARE * 200)
    assert predictions.peer_seconds(step, "H200") == pytest.approx(peer + 5 * LAUNCH)


def test_a_pass_of_many_instructions_is_bound_by_them() -> None:
    one = Pass("small", 1, 4, instructions=1000)
    issue = 1e9 * 1000 / predictions.ISSUE_RATE
    found = predictions.seconds(Prediction("x", 1e9, (one,)), "H100")
    assert found == pytest.approx(issue + LAUNCH)


def test_a_pass_that_goes_back_finds_what_the_cache_holds() -> None:
    back = Pass("small", 28, 4, begins_with=4)
    assert predictions.memory_bytes(back, 1e9) == 28e9 - predictions.CACHE
    assert predictions.memory_bytes(back, 1e6) == 24e6
    assert predictions.memory_bytes(Pass("small", 28, 4), 1e6) == 28e6


def test_a_kernel_that_the_budget_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected other in budget\.json, got none"):
        predictions.registers("other")


def test_every_prediction_is_of_a_row_and_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = {case.name: case.load().numel for case in gpu.CASES}
    names = {one.name for one in predictions.PREDICTIONS}
    for one in predictions.PREDICTIONS:
        assert sizes[one.name] == pytest.approx(one.elements, rel=2e-3), one.name
        assert predictions.seconds(one, "H100") > 0
    unpredicted = set(sizes) - names
    assert not any(name.startswith(("batch_norm", "layer", "rms", "cross")) for name in unpredicted)


def test_a_measurement_stands_beside_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row that failed has none."""
    monkeypatch.undo()
    assert "measured" not in predictions.gpu_predictions()
    rows = {"step/large": {"us": {"torchfuse": 700.0, "torch fused": 770.0}, "share": 0.9}}
    result = {
        "machine": {"gpu": "NVIDIA H100 80GB HBM3"},
        "stages": {"benchmarks": {"figures": {"rows": rows}}},
    }
    monkeypatch.setattr(gpu_result, "latest", lambda: ("path", result))
    table = predictions.gpu_predictions().splitlines()
    assert table[0].endswith("| measured, NVIDIA H100 80GB HBM3 | of a copy | measured ratio |")
    assert table[2].endswith("| 700\xa0µs | 90\xa0% | 1.10 |")
    assert table[3].endswith("|  |  |  |")


def test_the_paragraph_names_what_has_not_passed(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks/results/nvidia-h100"
    folder.mkdir(parents=True)
    result = {
        "kind": "gpu_run",
        "call": "a",
        "date": "2026-12-01T00:00:00+00:00",
        "sha": "0123456789",
        "machine": {"gpu": "NVIDIA H100"},
        "problems": ["expected a bundle of b, got one of c."],
        "stages": {"load": {"status": "passed"}, "ncu": {"status": "failed"}},
    }
    assert "Nothing has run" in gpu_result.paragraph(tmp_path, "README.md")
    (folder / "a.json").write_text(json.dumps(result))
    (folder / "b.json").write_text(json.dumps({**result, "call": "b", "date": "2027"}))
    (folder / "c.json").write_text(json.dumps({**result, "machine": {"gpu": "pretended"}}))
    text = gpu_result.paragraph(tmp_path, "README.md")
    assert "of commit `0123456`: not every stage passed (ncu failed), and not all was as" in text
    assert "(expected a bundle of b, got one of c.)" in text
    assert "(benchmarks/results/nvidia-h100/a.json)" in text
