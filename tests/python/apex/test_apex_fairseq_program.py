# SPDX-License-Identifier: BSD-3-Clause
"""A subclass of FusedAdam with a step of its own, in fp16 and for flat masters, as in fairseq."""

from __future__ import annotations

import pytest
import torch
from support.apex_programs import column, greatest_difference, networks, run

pytestmark = pytest.mark.processes

STEPS = 30


def in_plain_torch(max_norm: float) -> tuple[list[float], list[float]]:
    """Losses and norms of the same training with AdamW in fp32."""
    torch.manual_seed(0)
    model = networks.TinyBert()
    params = model.parameters()
    optimizer = torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    losses, norms = [], []
    parts = [part.split(32) for part in networks.sentences(32 * STEPS)]
    for words, labels, forwards in zip(*parts, strict=True):
        optimizer.zero_grad()
        loss = networks.bert_loss(model(words), labels, forwards)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("options", [("--memory-efficient",), ()], ids=["fp16", "flat masters"])
def test_it_trains_as_adamw_in_fp32(options: tuple[str, ...]) -> None:
    steps, (losses, norms) = run("train_fairseq", *options), in_plain_torch(0.5)
    assert greatest_difference(column(steps, "loss"), losses) < 3e-3
    assert greatest_difference(column(steps, "norm"), norms) < 1e-2
    assert losses[-1] < 0.95 * losses[0]
    # Which needs the clipping.
    without, _ = in_plain_torch(max_norm=1e9)
    assert greatest_difference(column(steps, "loss"), without) > 6e-3
