# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of two processes: rank 0 saves, and all agree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import join_group, leave_group, run_ranks
from torch import nn

import torchfuse
from torchfuse.optimizers import FusedAdam


class Broken:
    """A part that only rank 1 refuses."""

    def state_dict(self) -> dict[str, int]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise ValueError(f"rank 1 refuses {state}")


def _rank_saves_and_loads(rank: int, folder: str) -> None:
    join_group(rank, 2, folder)
    group = dist.group.WORLD
    path = Path(folder) / "last.pt"
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    torchfuse.save_checkpoint(path, model=model, optimizer=optimizer, rng=True, group=group)
    drawn = torch.randn(3)
    saved = model.module.weight.detach().clone()

    own = Path(folder) / f"own-{rank}.pt"
    torchfuse.save_checkpoint(own, values={"rank": rank})
    with pytest.raises(ValueError, match="the same file on all ranks, got a different file on r"):
        torchfuse.load_checkpoint(own, group=group)
    with torch.no_grad():
        model.module.weight.zero_()
    with pytest.raises(ValueError, match=r"last.pt to hold 'broken'"):
        torchfuse.load_checkpoint(path, model=model, broken=Broken(), group=group)
    parts: dict[str, Any] = {"model": model}
    parts["optimizer"] = FusedAdam(model.parameters(), ema_decay=0.9)
    torchfuse.save_checkpoint(path, **parts, broken=Broken(), group=group, rng=True)
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    parts = {"model": model, "optimizer": optimizer}
    with pytest.raises(ValueError, match=r"'broken' does not fit: rank 1 refuses"):
        torchfuse.load_checkpoint(path, **parts, broken=Broken(), group=group)
    assert optimizer.ema_decay is None
    assert torch.equal(model.module.weight, torch.ones(2, 2))

    with torch.no_grad():
        model.module.weight.copy_(saved)
    torch.manual_seed(rank)
    nn.Linear(2, 2)
    torchfuse.save_checkpoint(path, model=model, optimizer=optimizer, rng=True, group=group)
    torch.manual_seed(50)
    torchfuse.load_checkpoint(path, model=model, optimizer=optimizer, rng=True, group=group)
    assert torch.equal(torch.randn(3), drawn)  # each rank its own numbers
    assert torch.equal(model.module.weight, saved)
    contents = torch.load(path, weights_only=True)
    assert list(contents["model"]) == ["weight", "bias"]
    assert len(contents["rng"]) == 2
    assert not torch.equal(contents["rng"][0]["cpu"], contents["rng"][1]["cpu"])
    with pytest.raises(ValueError, match=r"of 1 processes, got 2\. Pass the same group= as"):
        torchfuse.load_checkpoint(path, rng=True)

    with pytest.raises(FileNotFoundError, match="load_checkpoint: could not read"):
        torchfuse.load_checkpoint(Path(folder) / f"only{1 - rank}.pt", model=model, group=group)

    # The class with apex's arguments is left out as torch's is.
    wrapped = torchfuse.parallel.DistributedDataParallel(nn.Linear(2, 2))
    torchfuse.save_checkpoint(path, model=wrapped, group=group)
    assert sorted(torch.load(path, weights_only=True)["model"]) == ["bias", "weight"]

    # Only rank 0 finds out that it cannot write.
    with pytest.raises(ValueError, match="to be a file, got a folder"):
        torchfuse.save_checkpoint(folder, model=model, group=group)
    assert [name for name in os.listdir(folder) if "tmp-" in name] == []
    leave_group()


def test_all_ranks_agree(tmp_path: Path) -> None:
    run_ranks(_rank_saves_and_loads, str(tmp_path), ranks=2)
