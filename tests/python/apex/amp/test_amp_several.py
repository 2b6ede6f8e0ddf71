# SPDX-License-Identifier: BSD-3-Clause
"""Several models, optimizers and losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.amp import LEVELS, make_batches, make_model, spoil, tensors_of
from support.compare import assert_all_same_bits
from torch import nn

from torchfuse.optimizers import FusedAdam, FusedSGD

DATA = make_batches(1)[0][0]


def small(output: torch.Tensor) -> torch.Tensor:
    """A loss whose scaled gradients are finite in fp16."""
    return output.square().mean()


# What initialize returns.


def test_lists_come_back_as_lists(amp: Any) -> None:
    def model() -> nn.Module:
        return make_model()

    def optimizer() -> torch.optim.Optimizer:
        return FusedAdam(make_model().parameters())

    def initialize(*arguments: Any) -> Any:
        result = amp.initialize(*arguments, verbosity=0)
        assert result is arguments[0] or all(
            got is given for got, given in zip(result, arguments, strict=True)
        )
        return result

    assert isinstance(initialize(model()), nn.Module)
    assert isinstance(initialize([model(), model()]), list)
    for models in (model(), [model()], [model(), model()]):
        for optimizers in (optimizer(), [optimizer()], []):
            assert isinstance(initialize(models, optimizers), tuple)


# A generator and a discriminator.


class ByHand:
    """Two fp32 optimizers with masters of two models, and two loss scales."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.models = [make_model(), make_model()]
        if level == "O2":
            for model in self.models:
                model.half()[1].float()
        self.params = [list(model.parameters()) for model in self.models]
        self.masters = [
            [nn.Parameter(p.detach().float()) if p.dtype == torch.float16 else p for p in params]
            for params in self.params
        ]
        self.optimizers = [FusedAdam(masters, lr=1e-2) for masters in self.masters]
        self.scales = [2.0**16, 2.0**16]

    def run(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        if self.level == "O1":
            with torch.autocast("cpu", dtype=torch.float16):
                output: torch.Tensor = model(data)
            return output.float()
        result: torch.Tensor = model(data.half()).float()
        return result

    def step(self, which: int, loss_of: Any, overflow: bool) -> None:
        for model in self.models:
            model.zero_grad()
        (loss_of(self.run, self.models) * self.scales[which]).backward()
        if overflow:
            spoil(self.models[which], 0)
            self.scales[which] /= 2
            return
        for param, master in zip(self.params[which], self.masters[which], strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() / self.scales[which]
        self.optimizers[which].step()
        with torch.no_grad():
            for param, master in zip(self.params[which], self.masters[which], strict=True):
                param.copy_(master)


def loss_of_discriminator(run: Any, models: Any) -> torch.Tensor:
    made = run(models[0], DATA).detach()
    return small(run(models[1], DATA)) - small(run(models[1], torch.cat([made, made], 1)))


def loss_of_generator(run: Any, models: Any) -> torch.Tensor:
    made = run(models[0], DATA)
    return small(run(models[1], torch.cat([made, made], 1)))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("num_losses", [1, 2])
def test_two_models_train_in_turn(amp: Any, level: str, num_losses: int) -> None:
    models = [make_model(), make_model()]
    optimizers = [FusedAdam(model.parameters(), lr=1e-2) for model in models]
    amp.initialize(models, optimizers, opt_level=level, num_losses=num_losses, verbosity=0)
    by_hand = ByHand(level)

    def run(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(data)
        return output

    overflows = {(1, 1), (2, 0), (2, 1)} if num_losses == 2 else set()
    for step in range(4):
        for which, loss_of in ((1, loss_of_discriminator), (0, loss_of_generator)):
            overflow = (step, which) in overflows
            optimizers[which].zero_grad()
            loss_id = which if num_losses == 2 else 0
            loss = loss_of(run, models)
            with amp.scale_loss(loss, optimizers[which], loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
                if overflow:
                    spoil(models[which], 0)
            optimizers[which].step()
            by_hand.step(which, loss_of, overflow)
    for which in (0, 1):
        assert_all_same_bits(
            tensors_of(
                models[which], list(amp.master_params(optimizers[which])), optimizers[which]
            ),
            tensors_of(by_hand.models[which], by_hand.masters[which], by_hand.optimizers[which]),
        )
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    assert scales == ([2.0**15, 2.0**14] if num_losses == 2 else [2.0**16])


@pytest.mark.parametrize("level", LEVELS)
def test_one_loss_for_two_optimizers(amp: Any, level: str) -> None:
    """Both step, or neither."""
    models = [make_model(), make_model()]
    optimizers = [FusedSGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level=level, loss_scale="dynamic", verbosity=0)
    for model in models:
        model.eval()
    start = [tensors_of(model, [], optimizers[0]) for model in models]
    for overflow in (True, False):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = small(models[0](DATA)) + small(models[1](DATA))
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
            if overflow:
                spoil(models[1], 3)
        for optimizer in optimizers:
            optimizer.step()
        moved = [
            not torch.equal(model[0].weight, before["model.0.weight"])
            for model, before in zip(models, start, strict=True)
        ]
        assert moved == [not overflow] * 2
    # Both have the same start, so the same steps.
    assert_all_same_bits(
        tensors_of(models[0], [], optimizers[0]), tensors_of(models[1], [], optimizers[1])
    )
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_of_the_same_parameters(amp: Any, level: str) -> None:
    model = make_model()
    optimizers = [FusedSGD(model.parameters(), lr=0.1), FusedSGD(model.parameters(), lr=0.2)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
    reference = make_model()
    amp.initialize(reference, opt_level=level, loss_scale=128.0, verbosity=0)
    for _ in range(2):  # accumulated, from gradients that exist
        with amp.scale_loss(small(model(DATA)), optimizers) as scaled_loss:
            scaled_loss.backward()
        small(reference(DATA)).backward()
    for optimizer in optimizers:
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


def test_an_optimizer_that_is_named_twice_counts_once(amp: Any) -> None:
    grads = []
    for count in (1, 2):
        model = make_model()
        optimizer = FusedAdam(model.parameters())
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for _ in range(2):
            with amp.scale_loss(small(model(DATA)), [optimizer] * count) as scaled_loss:
                scaled_loss.backward()
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)


# One call after the other, as for each fold of a cross-validation.


@pytest.mark.parametrize("level", LEVELS)
def test_a_second_call_with_new_objects(amp: Any, level: str) -> None:
    results = []
    for _ in range(2):
        model = make_model()
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(small(model(DATA)), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        results.append(tensors_of(model, list(amp.master_params(optimizer)), optimizer))
    assert_all_same_bits(*results)


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
