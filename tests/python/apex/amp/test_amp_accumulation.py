# SPDX-License-Identifier: BSD-3-Clause
"""Several scaled backward passes before one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.amp import LEVELS, ByHand, make_batches, make_model, spoil, tensors_of
from support.compare import assert_all_same_bits
from torch import nn
from torch.nn.functional import cross_entropy

from torchfuse.optimizers import FusedAdam, FusedSGD

BATCHES = make_batches(3)


def prepared(amp: Any, level: str, **options: Any) -> tuple[Any, Any]:
    model = make_model()
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic", **options
    )


def small_sum(model: Any, number: int) -> torch.Tensor:
    """A loss whose gradients are exact, and not infinite in fp16 when they are scaled."""
    outputs: torch.Tensor = model(BATCHES[number][0]) * 2.0**-8
    return outputs.sum()


def fail_after_backward(amp: Any, loss: torch.Tensor, optimizer: Any) -> None:
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        raise KeyError


def grads_of(amp: Any, optimizer: Any) -> list[torch.Tensor]:
    return [param.grad.clone() for param in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", ["model", "optimizer", "to zeros"])
def test_unscaled_each_time(amp: Any, level: str, zero: str) -> None:
    model, optimizer = prepared(amp, level)
    by_hand = ByHand(level, lambda params: FusedSGD(params, lr=0.1, momentum=0.9), 2.0**16, True)
    zeros: dict[str, Callable[[], None]] = {
        "model": model.zero_grad,
        "optimizer": optimizer.zero_grad,
        "to zeros": lambda: optimizer.zero_grad(set_to_none=False),
    }
    for _ in range(2):
        zeros[zero]()
        sums = [torch.zeros_like(master) for master in by_hand.masters]
        for batch in BATCHES:
            with amp.scale_loss(cross_entropy(model(batch[0]), batch[1]), optimizer) as scaled:
                scaled.backward()
            for param in by_hand.params:
                param.grad = None
            (by_hand.loss(*batch) * by_hand.scale).backward()
            for total, param in zip(sums, by_hand.params, strict=True):
                assert param.grad is not None
                total += (param.grad.float() / by_hand.scale).to(total.dtype)
        for master, total in zip(by_hand.masters, sums, strict=True):
            master.grad = total
        by_hand.optimizer.step()
        with torch.no_grad():
            for param, master in zip(by_hand.params, by_hand.masters, strict=True):
                param.copy_(master)
        optimizer.step()
        assert_all_same_bits(
            tensors_of(model, list(amp.master_params(optimizer)), optimizer),
            tensors_of(by_hand.model, by_hand.masters, by_hand.optimizer),
        )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_unscaling_adds_scaled_gradients(amp: Any, level: str) -> None:
    model, optimizer = prepared(amp, level)
    by_hand = ByHand(level, lambda params: torch.optim.SGD(params, lr=0.1), 2.0**16, True)
    for number, batch in enumerate(BATCHES):
        loss = cross_entropy(model(batch[0]), batch[1])
        with amp.scale_loss(loss, optimizer, delay_unscale=number < 2) as scaled:
            scaled.backward()
        assert optimizer._amp_stash.params_have_scaled_gradients == (number < 2)
        (by_hand.loss(*batch) * by_hand.scale).backward()
    for got, param in zip(grads_of(amp, optimizer), by_hand.params, strict=True):
        assert param.grad is not None
        assert torch.equal(got, param.grad.float() / by_hand.scale)
    # One check, and so one count.
    assert amp._amp_state.loss_scalers[0]._unskipped == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_gradients_follow_the_scale(amp: Any, level: str) -> None:
    model, optimizer = prepared(amp, level, num_losses=2)
    plain, plain_optimizer = prepared(amp, level, num_losses=2)
    model.eval(), plain.eval()
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**14
    for number, (data, target) in enumerate(BATCHES[:2]):
        loss = cross_entropy(model(data), target)
        last = number == 1
        with amp.scale_loss(loss, optimizer, loss_id=number, delay_unscale=not last) as scaled:
            scaled.backward()
        loss = cross_entropy(plain(data), target)
        with amp.scale_loss(loss, plain_optimizer, loss_id=number) as scaled:
            scaled.backward()
    pairs = zip(grads_of(amp, optimizer), grads_of(amp, plain_optimizer), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-6)


def test_delayed_unscaling_keeps_unscaled_gradients_apart(amp: Any) -> None:
    model, optimizer = prepared(amp, "O1")
    for delay in (False, True, False):
        with amp.scale_loss(small_sum(model, 0), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
    assert model[3].bias.grad.tolist() == [0.1875, 0.1875, 0.1875]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_one_of_several_passes_skips_the_step(
    amp: Any, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = prepared(amp, level)
    amp._amp_state.verbosity = 1
    model.eval()
    before = tensors_of(model, [], optimizer)
    for number, (data, target) in enumerate(BATCHES):
        with amp.scale_loss(cross_entropy(model(data), target), optimizer) as scaled:
            scaled.backward()
            if number == 1:
                spoil(model, 2)
    scaler = amp._amp_state.loss_scalers[0]
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**15, 1)
    optimizer.step()
    assert_all_same_bits(tensors_of(model, [], optimizer), before)
    assert capsys.readouterr().out.count("Gradient overflow") == 1
    optimizer.zero_grad()
    with amp.scale_loss(small_sum(model, 0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before["model.0.weight"])


def test_scaled_gradients_are_not_stepped_with(amp: Any) -> None:
    for level in ("O1", "O2"):
        model, optimizer = prepared(amp, level)
        with amp.scale_loss(small_sum(model, 0), optimizer, delay_unscale=True) as scaled:
            scaled.backward()
        message = (
            r"FusedSGD.step: expected unscaled gradients, got those of amp.scale_loss\(..., "
            r"delay_unscale=True\), which are 65536.0 times as large. Leave delay_unscale out"
        )
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_failed_backward_pass_leaves_the_gradients_of_before(amp: Any, level: str) -> None:
    model, optimizer = prepared(amp, level)
    with amp.scale_loss(small_sum(model, 0), optimizer) as scaled:
        scaled.backward()
    before = grads_of(amp, optimizer)
    scale = amp._amp_state.loss_scalers[0]
    with pytest.raises(KeyError):
        fail_after_backward(amp, small_sum(model, 1), optimizer)
    for got, expected in zip(grads_of(amp, optimizer), before, strict=True):
        assert torch.equal(got, expected)
    assert (scale.loss_scale(), scale._unskipped) == (2.0**16, 1)
    optimizer.step()


def test_sparse_gradients(amp: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    start = table.weight.detach().clone()
    amp.initialize(table, optimizer, opt_level="O1", verbosity=0)
    for rows in ([0, 1], [1, 1]):
        with amp.scale_loss(table(torch.tensor(rows)).sum(), optimizer) as scaled:
            scaled.backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    optimizer.step()
    moved = (start - table.weight.detach()).round()
    assert moved.tolist() == [[1.0, 1.0], [3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_group_added_in_training(amp: Any, level: str) -> None:
    model, extra = make_model(), make_model()
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    [model, extra], optimizer = amp.initialize(
        [model, extra], optimizer, opt_level=level, verbosity=0
    )
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(small_sum(model, 0) * small_sum(extra, 0), optimizer) as s:
            s.backward()
        optimizer.step()
        before = extra[0].weight.detach().clone()
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.1})
            optimizer.zero_grad()
    with amp.scale_loss(small_sum(extra, 0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(extra[0].weight, before)
    assert {param.dtype for param in amp.master_params(optimizer)} == {torch.float32}
    assert extra[0].weight.dtype == (torch.float16 if level == "O2" else torch.float32)
