# SPDX-License-Identifier: BSD-3-Clause
"""A program that uses pieces of apex that it finds, and its own otherwise, as Megatron does."""

from __future__ import annotations

import pytest
from support.apex_programs import column, greatest_difference, run

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_it_trains_as_with_its_own_pieces_in_torch(dtype: str, tolerance: float) -> None:
    options = ("--params-dtype", dtype)
    ours, theirs = (run("train_megatron", *options, alias=alias) for alias in (True, False))
    assert [run.pop(0) for run in (ours, theirs)] == [
        {"multi_tensor": there, "layer_norm": there} for there in (1, 0)
    ]
    for name in ("loss", "norm", "heads", "skipped"):
        assert greatest_difference(column(ours, name), column(theirs, name)) < tolerance
    assert [step for step, line in enumerate(ours) if line["skipped"]] == [3]
    # Gradients were clipped, and each norm is another one.
    assert max(column(ours, "norm")) > 0.5
    assert 0 < ours[0]["heads"] < ours[0]["norm"]
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.1
