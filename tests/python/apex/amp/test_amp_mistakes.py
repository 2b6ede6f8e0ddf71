# SPDX-License-Identifier: BSD-3-Clause
"""Programs that use apex.amp in a way that would train something else without a word."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support.amp import (
    LEVELS,
    backward,
    grads_of,
    make_batches,
    make_model,
    prepared,
    spoil,
    tensors_of,
    train_with,
)
from support.compare import assert_all_same_bits, assert_same_bits
from torch.nn.functional import cross_entropy

from torchfuse.optimizers import FusedSGD

#: What a test does not expect is an error.
pytestmark = pytest.mark.filterwarnings("error::UserWarning")

BATCHES = make_batches(3)
with_sgd = partial(prepared, name="FusedSGD")


def loss_of(model: Any) -> torch.Tensor:
    return cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])


# Blocks of scale_loss.


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_or_a_step_inside_a_block(amp: Any, level: str) -> None:
    model, optimizer = with_sgd(amp, level)
    before = tensors_of(model.eval(), [], optimizer)
    message = "amp.scale_loss: expected no block of FusedSGD inside another block, got two. End the"
    with pytest.raises(RuntimeError, match=message), amp.scale_loss(loss_of(model), optimizer):
        backward(amp, loss_of(model), optimizer)
    message = r"FusedSGD\.step\(\) was called within a block of amp\.scale_loss\. The gradients"
    with pytest.raises(RuntimeError, match=message), amp.scale_loss(loss_of(model), optimizer):
        optimizer.step()
    assert_all_same_bits(tensors_of(model, [], optimizer), before)
    train_with(amp, model, optimizer, BATCHES[:1])  # all are closed


@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_inside_a_block_drops_the_gradients_of_before(amp: Any, level: str) -> None:
    model, optimizer = with_sgd(amp, level)
    backward(amp, loss_of(model.eval()), optimizer)
    once = grads_of(amp, optimizer)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        optimizer.zero_grad()
        scaled_loss.backward()
    for mine, expected in zip(grads_of(amp, optimizer), once, strict=True):
        assert_same_bits(mine, expected)


def test_zero_grad_between_passes_that_stay_scaled_drops_both_kinds(amp: Any) -> None:
    model, optimizer = with_sgd(amp, "O1")
    model.eval()
    backward(amp, loss_of(model), optimizer)
    once = grads_of(amp, optimizer)
    backward(amp, loss_of(model), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    backward(amp, loss_of(model), optimizer)
    for mine, expected in zip(grads_of(amp, optimizer), once, strict=True):
        assert_same_bits(mine, expected)


def test_a_loss_that_is_not_scaled_is_warned_of(amp: Any) -> None:
    model, optimizer = with_sgd(amp, "O1")
    message = r"amp.scale_loss: expected a backward pass of the scaled loss within the block, got"
    loss = loss_of(model)
    with pytest.warns(UserWarning, match=message), amp.scale_loss(loss, optimizer):
        loss.backward()
    # As an error, the warning comes when the block has ended.
    optimizer.zero_grad()
    with pytest.raises(UserWarning, match=message), amp.scale_loss(loss_of(model), optimizer):
        pass
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        (2 * scaled_loss).backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_whose_gradients_are_gone_skips_no_later_step(amp: Any, level: str) -> None:
    model, optimizer = with_sgd(amp, level, loss_scale="dynamic")
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        spoil(model, 0)
    optimizer.zero_grad()  # the program goes on without a step
    before = model[0].weight.detach().clone()
    train_with(amp, model, optimizer, BATCHES[:1])
    assert not torch.equal(model[0].weight, before)


# Steps.


def test_a_step_without_scale_loss_is_noticed(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2")
    message = (
        r"FusedAdam.step: expected gradients from amp\.scale_loss since the last step, got gradie"
        "nts that are older or were not copied to the masters"
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        train_with(amp, model, optimizer, BATCHES[:1])
    # Zeros are what an earlier zero_grad has left.
    for param in model.parameters():
        param.grad.zero_()
    optimizer.step()

    model, optimizer = prepared(amp, "O1")
    optimizer.step()
    loss_of(model).backward()
    with pytest.warns(UserWarning, match=r"expected gradients from amp\.scale_loss, got unsca"):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("O1", r"FusedAdam.step: expected no closure with a dynamic loss scale, got one. An over"),
        ("O2", "FusedAdam.step: expected no closure with master weights, got one"),
    ],
)
def test_a_closure_whose_step_could_not_be_skipped_is_refused(
    amp: Any, level: str, message: str
) -> None:
    model, optimizer = prepared(amp, level)
    train_with(amp, model, optimizer, BATCHES[:1])
    optimizer.zero_grad()
    before = tensors_of(model, [], optimizer)
    for call in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        with pytest.raises(RuntimeError, match=message):
            call(lambda: 3.0)
    assert_all_same_bits(tensors_of(model, [], optimizer), before)
    _, optimizer = with_sgd(amp, "O1", loss_scale=1.0)
    assert optimizer.step(lambda: 3.0) == 3.0


# Optimizers that scale_loss is not given.


def two(amp: Any, level: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    first, second = make_model(), make_model()
    one, other = FusedSGD(first.parameters(), lr=0.1), FusedSGD(second.parameters(), lr=0.1)
    arguments = {"opt_level": level, "verbosity": 0, **options}
    (first, second), (one, other) = amp.initialize([first, second], [one, other], **arguments)
    return first, second, one, other


FOREIGN = (
    r"FusedSGD\.step: expected unscaled gradients, got gradients scaled by \d+\.0 from amp\.scale"
    r"_loss with another optimizer\. Call zero_grad\(\) before backward, or pass both"
)
SCALED: Any = [("O1", {}), ("O3", {"loss_scale": 128.0})]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("level", "options"), SCALED, ids=["O1", "O3"])
def test_scaled_gradients_of_another_optimizers_loss_are_warned_of(
    amp: Any, level: str, options: dict[str, Any], fails: bool
) -> None:
    first, second, one, other = two(amp, level, **options)

    def block() -> None:
        with amp.scale_loss(loss_of(first) + loss_of(second), one) as scaled_loss:
            scaled_loss.backward()
            if fails:
                raise KeyError("out of memory")

    for _ in range(3):  # what is remembered does not grow
        if fails:
            with pytest.raises(KeyError):
                block()
        else:
            block()
    assert len(other._amp_stash._foreign) == len(list(second.parameters()))
    with pytest.warns(UserWarning, match=FOREIGN):
        other.step()
    other.step()


def test_blocks_of_two_optimizers_at_once(amp: Any) -> None:
    first, second, one, other = two(amp, "O1", num_losses=2)
    losses = loss_of(first), loss_of(second)
    with amp.scale_loss(losses[0], one, 0) as a, amp.scale_loss(losses[1], other, 1) as b:
        a.backward()
        b.backward()
    one.step()
    other.step()


def test_a_shared_parameter_keeps_its_overflow(amp: Any) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    one = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    models, optimizers = [first, second], [one, other]
    amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
    before = [param.detach().clone() for model in models for param in model.parameters()]
    for factor in (float("inf"), 1.0):  # two parts of a batch
        loss = second(first(torch.ones(3, 2))).sum() * factor * 1e-3
        backward(amp, loss, optimizers)
    for optimizer in optimizers:
        optimizer.step()
    after = [param for model in models for param in model.parameters()]
    for param, value in zip(after, before, strict=True):
        assert_same_bits(param, value)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model", "program"])
def test_gradients_that_were_dropped_or_unscaled_are_no_mistake(
    amp: Any, whose: str, set_to_none: bool
) -> None:
    first, second, one, other = two(amp, "O1")
    backward(amp, loss_of(first) + loss_of(second), one)
    scale = amp._amp_state.loss_scalers[0].loss_scale()
    if whose == "program":
        for param in second.parameters():
            param.grad.mul_(1.0 / scale)
    else:
        (other if whose == "optimizer" else second).zero_grad(set_to_none=set_to_none)
    backward(amp, loss_of(second), other)
    other.step()


# initialize.


def test_an_optimizer_of_another_model_is_warned_of(amp: Any) -> None:
    model = make_model()
    optimizer = FusedSGD(copy.deepcopy(model).parameters(), lr=0.1)
    message = r"expected optimizers\[0\] to have parameters of the models, got a FusedSGD without"
    with pytest.warns(UserWarning, match=message):
        amp.initialize(model, optimizer, verbosity=0)


def test_masters_without_a_place_are_warned_of(amp: Any) -> None:
    model, optimizer = with_sgd(amp, "O2")
    train_with(amp, model, optimizer, BATCHES[:1])
    saved = optimizer.state_dict()
    message = r"FusedSGD\.load_state_dict: expected 16-bit parameters for the \d masters in state_d"
    for other in (FusedSGD(make_model().parameters(), lr=0.1), with_sgd(amp, "O1")[1]):
        with pytest.warns(UserWarning, match=message):
            other.load_state_dict(saved)
    optimizer.load_state_dict(saved)
