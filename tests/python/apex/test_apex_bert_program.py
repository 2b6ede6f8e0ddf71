# SPDX-License-Identifier: BSD-3-Clause
"""Pre-training as BERT's programs do it: O2, LAMB, accumulation, clipping of the masters."""

from __future__ import annotations

import pytest
import torch
from support.apex_programs import PlainLAMB, column, greatest_difference, networks, run

pytestmark = pytest.mark.processes


def in_plain_torch(skipped: list[float]) -> list[float]:
    """Losses of the same training in fp32, without the updates that were skipped."""
    torch.manual_seed(0)
    model = networks.TinyBert()
    named = list(model.named_parameters())
    plain = [p for name, p in named if "bias" in name or "norm" in name]
    decayed = [p for name, p in named if not ("bias" in name or "norm" in name)]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = PlainLAMB(groups, lr=3e-2)
    parts = [x.split(16) for x in networks.sentences(32 * len(skipped))]
    batches = iter(zip(*parts, strict=True))
    losses: list[float] = []
    for is_skipped in skipped:
        model.zero_grad()
        losses.append(0.0)
        for _ in range(2):
            words, labels = next(batches)
            loss = networks.bert_loss(model(words), labels) / 2
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        if not is_skipped:
            optimizer.step()
    return losses


@pytest.mark.parametrize("delayed", ["unscale", "overflow-check"])
def test_it_trains_as_in_fp32(delayed: str) -> None:
    updates = run("pretrain_bert", "--delay", delayed)
    losses, skipped = column(updates, "loss"), column(updates, "skipped")
    # The first scale is too large, and is halved until nothing overflows.
    assert skipped[0] == 1
    assert sum(skipped) < 8
    assert updates[-1]["scale"] == 2.0 ** (20 - sum(skipped))
    expected = in_plain_torch(skipped)
    assert greatest_difference(losses, expected) < 2e-3
    assert expected[-1] < expected[0] - 0.2
