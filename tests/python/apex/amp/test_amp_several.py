# SPDX-License-Identifier: BSD-3-Clause
"""Several models, optimizers, losses and processes, and several passes before one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.amp import (
    LEVELS,
    OPTIMIZERS,
    ByHand,
    all_tensors,
    backward,
    grads_of,
    make_batches,
    make_model,
    prepared,
    spoil,
    tensors_of,
    train_with,
)
from support.cases import run_cases
from support.compare import assert_all_same_bits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from torchfuse.apex import amp as own_amp
from torchfuse.optimizers import FusedAdam, FusedSGD
from torchfuse.parallel import DistributedDataParallel

DATA = make_batches(1)[0][0]
BATCHES = make_batches(3)


def small(output: torch.Tensor) -> torch.Tensor:
    """A loss whose scaled gradients are finite in fp16."""
    return output.square().mean()


adam = OPTIMIZERS["FusedAdam"]


def test_lists_come_back_as_lists(amp: Any) -> None:
    for models in (make_model(), [make_model(), make_model()]):
        assert amp.initialize(models, verbosity=0) is models
    for many in (False, True):
        model = make_model()
        models = [model] if many else model
        for optimizers in (adam(model.parameters()), [adam(model.parameters())], []):
            result = amp.initialize(models, optimizers, verbosity=0)
            assert isinstance(result, tuple)
            assert result[0] is models
            assert result[1] is optimizers


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_models_train_in_turn(amp: Any, level: str) -> None:
    """Each bit for bit as alone and by hand, with the scale of its loss."""
    models = [make_model(), make_model()]
    optimizers = [adam(list(model.parameters())) for model in models]
    amp.initialize(models, optimizers, opt_level=level, num_losses=2, verbosity=0)
    by_hand = [ByHand(level, adam, 2.0**16, True) for _ in models]
    overflows = {(1, 1), (2, 0), (2, 1)}
    for step, (data, target) in enumerate(make_batches(4)):
        for which in (1, 0):
            optimizers[which].zero_grad()
            loss = cross_entropy(models[which](data), target)
            with amp.scale_loss(loss, optimizers[which], loss_id=which) as scaled_loss:
                scaled_loss.backward()
                if (step, which) in overflows:
                    spoil(models[which], 0)
            optimizers[which].step()
            spoiled = [(0, 0)] if (step, which) in overflows else []
            by_hand[which].train([(data, target)], spoiled)
    for model, optimizer, plain in zip(models, optimizers, by_hand, strict=True):
        expected = tensors_of(plain.model, plain.masters, plain.optimizer)
        assert_all_same_bits(all_tensors(amp, model, optimizer), expected)
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    assert scales == [2.0**15, 2.0**14]


#: Two devices, or the host and the one device.
DEVICES = ["cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cpu"]
CUDA = [pytest.param(order, marks=pytest.mark.cuda) for order in (DEVICES, DEVICES[::-1])]


@pytest.mark.parametrize("places", [["cpu", "cpu"], *CUDA], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_one_loss_for_two_optimizers(amp: Any, level: str, places: list[str]) -> None:
    """Both step, or neither."""
    models = [make_model(device).eval() for device in places]
    optimizers = [FusedSGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level=level, loss_scale="dynamic", verbosity=0)
    before = [model[0].weight.detach().clone() for model in models]
    for spoiled in (0, 1, None):
        losses = [small(m(DATA.to(at))).to(places[0]) for m, at in zip(models, places, strict=True)]
        with amp.scale_loss(losses[0] + losses[1], optimizers) as scaled_loss:
            scaled_loss.backward()
            if spoiled is not None:
                spoil(models[spoiled], 3)
        for optimizer, model, weight in zip(optimizers, models, before, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(model[0].weight, weight) == (spoiled is not None)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**14


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_of_the_same_parameters(amp: Any, level: str, count: int) -> None:
    """Or one that is named twice."""
    model, reference = make_model(), make_model()
    different = [FusedSGD(model.parameters(), lr=rate) for rate in (0.1, 0.2)[:count]]
    amp.initialize(model, different, opt_level=level, loss_scale=128, verbosity=0)
    amp.initialize(reference, opt_level=level, loss_scale="1.28e2", verbosity=0)
    for _ in range(2):  # accumulated, from gradients that exist
        backward(amp, small(model(DATA)), [different[0], different[-1]])
        small(reference(DATA)).backward()
    for optimizer in different:
        for got, param in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
            assert got.grad is not None
            assert param.grad is not None
            torch.testing.assert_close(got.grad.float(), param.grad.float(), rtol=3e-2, atol=1e-5)


def test_two_losses_of_one_optimizer_have_their_own_scales(amp: Any) -> None:
    model = make_model()
    optimizer = FusedAdam(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", num_losses=3, verbosity=0)
    for loss_id, overflow in ((0, False), (1, True), (2, False)):
        with amp.scale_loss(small(model(DATA)), optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()
            if overflow:
                spoil(model, 0)
    assert optimizer._amp_stash.already_patched
    optimizer.step()
    assert not optimizer._amp_stash.already_patched
    assert list(amp.state_dict().values()) == [
        {"loss_scale": 2.0**16, "unskipped": 1},
        {"loss_scale": 2.0**15, "unskipped": 0},
        {"loss_scale": 2.0**16, "unskipped": 1},
    ]


# One call after the other, as for each fold of a cross-validation.


def test_a_second_optimizer_of_the_same_model(amp: Any) -> None:
    model = make_model()
    for outputs in (None, torch.float64):
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        amp.initialize(model, optimizer, opt_level="O1", cast_model_outputs=outputs, verbosity=0)
        assert model(DATA).dtype == (outputs or torch.float32)
        assert len(type(model).__mro__) == len(nn.Sequential.__mro__) + 1


# Off.


def test_disabled(amp: Any) -> None:
    model = make_model()
    optimizer = FusedAdam(model.parameters())
    step, kind = optimizer.step, type(model)
    assert amp.initialize(model, enabled=False) is model
    result = amp.initialize([model], optimizer, enabled=False, opt_level="O2")
    assert result == ([model], optimizer)
    assert (type(model), model[0].weight.dtype) == (kind, torch.float32)
    assert (optimizer.step, hasattr(optimizer, "_amp_stash")) == (step, False)
    loss = small(model(DATA))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 3}})
    assert not amp._amp_state.opt_properties.enabled


# Passes before one step.

with_sgd = partial(prepared, name="FusedSGD", loss_scale="dynamic")


def small_sum(model: Any, number: int) -> torch.Tensor:
    """A loss whose gradients are exact, and not infinite in fp16 when they are scaled."""
    outputs: torch.Tensor = model(BATCHES[number][0]) * 2.0**-8
    return outputs.sum()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", ["model", "to zeros"])
def test_unscaled_each_time(amp: Any, level: str, zero: str) -> None:
    model, optimizer = with_sgd(amp, level)
    model.eval()
    optimizer.param_groups[0]["lr"] = 0.0

    def grads(batches: Any) -> list[torch.Tensor]:
        model.zero_grad() if zero == "model" else optimizer.zero_grad(set_to_none=False)
        for data, target in batches:
            backward(amp, cross_entropy(model(data), target), optimizer)
        found = grads_of(amp, optimizer)
        optimizer.step()
        return found

    apart = zip(*(grads([batch]) for batch in BATCHES), strict=True)
    for got, parts in zip(grads(BATCHES), apart, strict=True):
        assert torch.equal(got, parts[0] + parts[1] + parts[2])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_gradients_follow_the_scale(amp: Any, level: str) -> None:
    model, optimizer = with_sgd(amp, level, num_losses=2)
    plain, plain_optimizer = with_sgd(amp, level, num_losses=2)
    model.eval(), plain.eval()
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**14
    for number, (data, target) in enumerate(BATCHES[:2]):
        loss = cross_entropy(model(data), target)
        last = number == 1
        backward(amp, loss, optimizer, loss_id=number, delay_unscale=not last)
        assert optimizer._amp_stash.params_have_scaled_gradients == (not last)
        loss = cross_entropy(plain(data), target)
        backward(amp, loss, plain_optimizer, loss_id=number)
    pairs = zip(grads_of(amp, optimizer), grads_of(amp, plain_optimizer), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-6)
    # The two losses of the other have been checked, and its last one.
    assert [scaler._unskipped for scaler in amp._amp_state.loss_scalers] == [1, 2]


def test_delayed_unscaling_keeps_unscaled_gradients_apart(amp: Any) -> None:
    model, optimizer = with_sgd(amp, "O1")
    for delay in (False, True, False):
        backward(amp, small_sum(model, 0), optimizer, delay_unscale=delay)
    assert model[3].bias.grad.tolist() == [0.1875, 0.1875, 0.1875]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_one_of_several_passes_skips_the_step(
    amp: Any, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = with_sgd(amp, level)
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
    backward(amp, small_sum(model, 0), optimizer)
    optimizer.step()
    assert not torch.equal(model[0].weight, before["model.0.weight"])


def test_scaled_gradients_are_not_stepped_with(amp: Any) -> None:
    for level in ("O1", "O2"):
        model, optimizer = with_sgd(amp, level)
        backward(amp, small_sum(model, 0), optimizer, delay_unscale=True)
        message = (
            r"FusedSGD.step: expected unscaled gradients, got gradients scaled by 65536.0 "
            r"from amp.scale_loss\(..., delay_unscale=True\)\. Leave delay_unscale out"
        )
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_failed_backward_pass_leaves_the_gradients_of_before(amp: Any, level: str) -> None:
    model, optimizer = with_sgd(amp, level)
    backward(amp, small_sum(model, 0), optimizer)
    before = grads_of(amp, optimizer)
    scale = amp._amp_state.loss_scalers[0]
    loss = small_sum(model, 1)
    with contextlib.suppress(KeyError), amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        raise KeyError
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
        backward(amp, table(torch.tensor(rows)).sum(), optimizer)
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    optimizer.step()
    moved = (start - table.weight.detach()).round()
    assert moved.tolist() == [[1.0, 1.0], [3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_group_added_in_training(amp: Any, level: str) -> None:
    model, extra = make_model(), make_model()
    optimizer = adam(list(model.parameters()))
    amp.initialize([model, extra], optimizer, opt_level=level, verbosity=0)
    backward(amp, small_sum(model, 0), optimizer)
    optimizer.step()
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.1})
    optimizer.zero_grad()
    before = extra[0].weight.detach().clone()
    backward(amp, small_sum(model, 0) * small_sum(extra, 0), optimizer)
    optimizer.step()
    assert not torch.equal(extra[0].weight, before)
    assert {param.dtype for param in amp.master_params(optimizer)} == {torch.float32}
    assert extra[0].weight.dtype == (torch.float16 if level == "O2" else torch.float32)


# Two ranks, with DistributedDataParallel of both kinds.

RANKS = 2
ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torchfuse": partial(DistributedDataParallel, delay_allreduce=True),
    "torch": TorchDdp,
    "torch with views": partial(TorchDdp, gradient_as_bucket_view=True),
}
STEPS = 4


def train(level: str, engine: str, rank: int) -> list[torch.Tensor]:
    """Each rank has half of every batch; the gradients of one overflow in the second step."""
    model, optimizer = prepared(own_amp, level)
    wrapped = ENGINES[engine](model.eval())
    for step, (data, target) in enumerate(make_batches(STEPS)):
        optimizer.zero_grad()
        half = slice(8 * rank, 8 * rank + 8)
        loss = cross_entropy(wrapped(data[half]), target[half])
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        backward(own_amp, loss, optimizer)
        optimizer.step()
    scale = torch.tensor(own_amp._amp_state.loss_scalers[0].loss_scale())
    return [*(param.detach().float() for param in own_amp.master_params(optimizer)), scale]


CASES = {
    f"{level} {engine}": partial(train, level, engine)
    for level in ("O1", "O2")
    for engine in ENGINES
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("amp")
    return run_cases(folder, RANKS, CASES)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_alike_and_skip_together(case: str, trained: dict[str, list[Any]]) -> None:
    first, second = trained[case]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[-1] == 2.0**15
    # One process with whole batches, which skips the same step.
    model, optimizer = prepared(own_amp, case.split()[0])
    start = [param.detach().float().clone() for param in model.parameters()]
    train_with(own_amp, model.eval(), optimizer, make_batches(STEPS), overflows=[(1, 0)])
    masters = own_amp.master_params(optimizer)
    for got, expected, before in zip(first[:-1], masters, start, strict=True):
        assert (got - before).norm() > 1e-3
        torch.testing.assert_close(got, expected.detach(), rtol=0, atol=2e-3)
