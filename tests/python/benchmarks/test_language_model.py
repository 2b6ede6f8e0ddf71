# SPDX-License-Identifier: BSD-3-Clause
"""The comparison of trainings states the steps that its losses show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import language_model
import report
import result_file


def test_all_learning_rates_are_in_the_result(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert (
        language_model.main(["--quick", "--steps", "2", "--threads", "1", "--out", str(out)]) == 0
    )
    curves = result_file.read(out)["curves"]
    expected = [(k.__name__, rate) for k, rates in language_model.RATES.items() for rate in rates]
    assert [(curve["optimizer"], curve["lr"]) for curve in curves] == expected
    assert all([step for step, _ in curve["points"]] == [0, 2] for curve in curves)
    assert len({curve["points"][0][1] for curve in curves}) == 1


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((5.0, 2.0, 1.0), "2.00, after 10 of 20 steps"),
        ((5.0, 4.0, 3.0), "2.00, in none of 20 steps"),
    ],
)
def test_steps_to_the_same_loss(losses: tuple[float, ...], words: str) -> None:
    def curve(optimizer: str, values: tuple[float, ...]) -> dict[str, Any]:
        points = [list(point) for point in zip((0, 10, 20), values, strict=True)]
        return {"optimizer": optimizer, "points": points}

    worse = curve("FusedAdam", (5.0, 3.5, 3.0))
    curves = [worse, curve("FusedAdam", (5.0, 3.0, 2.0)), curve("FusedMuon", losses)]
    assert report.steps_to_loss({"curves": curves}) == words
