# SPDX-License-Identifier: BSD-3-Clause
"""A program that uses apex's three names for training if it has them, as timm's did."""

from __future__ import annotations

import pytest
from support.apex_programs import column, greatest_difference, run

pytestmark = pytest.mark.processes


def test_with_apex_it_trains_as_with_torchs_own_in_one_process() -> None:
    """O1 in two processes, against torch.autocast with fp16 and GradScaler in one."""
    ours, theirs = run("train_timm", "--sync-bn", ranks=2), run("train_timm", alias=False)
    assert (ours.pop(0), theirs.pop(0)) == ({"apex": 1}, {"apex": 0})
    losses, expected = column(ours, "loss"), column(theirs, "loss")
    assert greatest_difference(losses, expected) < 1e-2
    assert min(losses[-3:]) < 0.6 * losses[0]
    apart = run("train_timm", ranks=2)[1:]
    assert greatest_difference(column(apart, "loss"), expected) > 5e-2
