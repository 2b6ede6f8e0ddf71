# SPDX-License-Identifier: BSD-3-Clause
"""Predictions follow from bytes, recorded registers and launches, as their page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpu_predictions as predictions
from gpu_predictions import GAP, Pass, Prediction

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


def test_a_kernel_with_too_few_loads_in_flight_reaches_less() -> None:
    assert predictions.share(Pass("small", 28, 4)) == predictions.BEST_SHARE
    assert predictions.share(Pass("large", 28, 4)) == pytest.approx(predictions.BEST_SHARE * 2 / 3)


def test_passes_add_up_and_launches_wait() -> None:
    step = Prediction("step", 1e9, (Pass("small", 4, 4), Pass("small", 28, 4)), "peer", 48, 5)
    stream = 32 / (predictions.BEST_SHARE * 100)
    assert predictions.seconds(step, "H100") == pytest.approx(stream + GAP)
    assert predictions.seconds(step, "H200") == pytest.approx(stream / 2 + GAP)
    peer = 48 / (predictions.PEER_SHARE * 200)
    assert predictions.peer_seconds(step, "H200") == pytest.approx(peer + 4 * GAP)


def test_a_pass_that_goes_back_finds_what_the_cache_holds() -> None:
    back = Pass("small", 28, 4, begins_with=4)
    assert predictions.memory_bytes(back, 1e9) == 28e9 - predictions.CACHE
    assert predictions.memory_bytes(back, 1e6) == 24e6
    assert predictions.memory_bytes(Pass("small", 28, 4), 1e6) == 28e6


def test_a_kernel_that_the_budget_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected other in budget\.json, got none"):
        predictions.registers("other")


def test_every_prediction_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = predictions.gpu_predictions().splitlines()
    assert len(rows) == 2 + len(predictions.PREDICTIONS)


def test_a_norm_is_compared_with_a_norm() -> None:
    """As benchmarks/run.py measures it: neither side clips."""
    (norm,) = (one for one in predictions.PREDICTIONS if one.name == "norm and check")
    assert norm.peer == "get_total_norm"
    assert norm.peer_bytes == sum(part.bytes_per_element for part in norm.passes)
