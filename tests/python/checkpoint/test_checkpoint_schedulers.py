# SPDX-License-Identifier: BSD-3-Clause
"""Schedulers in checkpoints: none without its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from test_checkpoint_parts import stepped
from torch.optim import lr_scheduler

import torchfuse
from torchfuse.apex.fp16_utils import FP16_Optimizer
from torchfuse.optimizers import FusedAdam, FusedSGD
from torchfuse.parallel import LARC


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "last.pt"


def test_a_scheduler_belongs_to_an_optimizer_of_the_checkpoint(path: Path) -> None:
    actors, critics = stepped(FusedAdam), stepped(FusedSGD)
    own, others = lr_scheduler.StepLR(actors, 3), lr_scheduler.StepLR(critics, 3)
    torchfuse.save_checkpoint(path, optimizer=actors, scheduler=own)
    refused = (
        ": expected 'scheduler' to be the scheduler of an optimizer in the checkpoint, got that of "
        "a FusedSGD that is not in it. Add this optimizer, or build the scheduler for one that is."
    )
    before = actors.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.raises(ValueError, match=f"^save_checkpoint{refused}$"):
        torchfuse.save_checkpoint(path, optimizer=actors, scheduler=others)
    with pytest.raises(ValueError, match=f"^load_checkpoint{refused}$"):
        torchfuse.load_checkpoint(path, optimizer=actors, scheduler=others)
    assert_same_bits(actors.state_dict()["state"][0]["exp_avg"], before)
    with pytest.raises(ValueError, match=f"^save_checkpoint{refused}$"):
        torchfuse.save_checkpoint(path, scheduler=others)
    # With its optimizer it is taken.
    both = {"scheduler": others, "critics": LARC(critics), "actors": actors}
    torchfuse.save_checkpoint(path, **both)
    torchfuse.load_checkpoint(path, **both)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as frameworks have them."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside
        self.param_groups = inside.param_groups

    def state_dict(self) -> Any:
        return self.inside.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inside.load_state_dict(state)


@pytest.mark.parametrize("around", [Wrapper, FP16_Optimizer])
def test_what_holds_the_optimizer_of_a_scheduler_is_not_refused(path: Path, around: Any) -> None:
    inside = stepped(FusedAdam)
    parts = {"optimizer": around(inside), "scheduler": lr_scheduler.StepLR(inside, 3)}
    torchfuse.save_checkpoint(path, **parts)
    torchfuse.load_checkpoint(path, **parts)
