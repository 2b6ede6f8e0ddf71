# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of a program for apex: what it saves, and how it goes on."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.amp import LEVELS, ByHand, make_batches, make_model, tensors_of, train_with
from support.compare import assert_all_same_bits
from torch.nn.functional import cross_entropy

from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedSGD

BATCHES = make_batches(6)
OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": FusedAdam,
    "FusedSGD": lambda params, lr: FusedSGD(params, lr=lr, momentum=0.9),
    "FusedLAMB": FusedLAMB,
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "Adam": lambda params, lr: torch.optim.Adam(params, lr=lr, eps=1e-4),
}
PARTS = ("model", "optimizer", "amp")


def prepared(amp: Any, level: str, make: Any, **options: Any) -> tuple[Any, Any]:
    model = make_model()
    optimizer = make(model.parameters(), lr=1e-2)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def saved(amp: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """What a program saves, after the way through a file."""
    states = (model.state_dict(), optimizer.state_dict(), amp.state_dict())
    file = io.BytesIO()
    torch.save(dict(zip(PARTS, states, strict=True)), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def all_tensors(amp: Any, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return tensors_of(model, list(amp.master_params(optimizer)), optimizer)


@pytest.mark.parametrize("order", [PARTS, PARTS[::-1]], ids=["model first", "model last"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_makes_the_same_steps(
    amp: Any, level: str, name: str, order: tuple[str, ...]
) -> None:
    model, optimizer = prepared(amp, level, OPTIMIZERS[name])
    overflows = [(1, 0)] if level in ("O1", "O2") else []
    train_with(amp, model, optimizer, BATCHES[:3], overflows)
    checkpoint = saved(amp, model, optimizer)
    train_with(amp, model, optimizer, BATCHES[3:])
    whole, scales = all_tensors(amp, model, optimizer), amp.state_dict()

    torch.manual_seed(9)
    model, optimizer = prepared(amp, level, OPTIMIZERS[name])
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # other values than before
    targets = {"model": model, "optimizer": optimizer, "amp": amp}
    for part in order:
        targets[part].load_state_dict(checkpoint[part])
    train_with(amp, model, optimizer, BATCHES[3:])
    assert_all_same_bits(all_tensors(amp, model, optimizer), whole)
    assert amp.state_dict() == scales


def test_only_the_masters_of_o2_are_added(amp: Any) -> None:
    for level in LEVELS:
        model, optimizer = prepared(amp, level, FusedAdam)
        assert set(optimizer.state_dict()) - {"master_params"} == {"state", "param_groups"}
        train_with(amp, model, optimizer, BATCHES[:1])
        state_dict = optimizer.state_dict()
        assert ("master_params" in state_dict) == (level == "O2")
    masters = list(amp.master_params(prepared_and_stepped(amp)))
    assert [m.dtype for m in masters] == [torch.float32] * 6


def prepared_and_stepped(amp: Any) -> Any:
    model, optimizer = prepared(amp, "O2", FusedAdam)
    train_with(amp, model, optimizer, BATCHES[:1])
    found = optimizer.state_dict()["master_params"]
    # Batch normalization is in fp32 and has none.
    assert set(found) == {0, 1, 4, 5}
    for number, master in enumerate(amp.master_params(optimizer)):
        assert number not in found or torch.equal(found[number], master)
    return optimizer


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["FusedAdam", "Adam"])
def test_a_checkpoint_of_o2_loads_at_every_level(amp: Any, level: str, name: str) -> None:
    model, optimizer = prepared(amp, "O2", OPTIMIZERS[name])
    train_with(amp, model, optimizer, BATCHES[:2])
    checkpoint = saved(amp, model, optimizer)
    assert {v.dtype for v in checkpoint["model"].values()} == {torch.float32, torch.int64}
    other, other_optimizer = prepared(amp, level, OPTIMIZERS[name])
    other.load_state_dict(checkpoint["model"])
    other_optimizer.load_state_dict(checkpoint["optimizer"])
    assert torch.equal(other[0].weight.float(), model[0].weight.float())
    train_with(amp, other, other_optimizer, BATCHES[2:3])
    # And without amp.
    plain = make_model()
    plain.load_state_dict(checkpoint["model"])
    OPTIMIZERS[name](plain.parameters(), lr=1e-2).load_state_dict(checkpoint["optimizer"])


def test_a_checkpoint_without_masters_keeps_fp32_state(amp: Any) -> None:
    """As apex has saved it; masters come from the model."""
    model, optimizer = prepared(amp, "O2", OPTIMIZERS["Adam"])
    train_with(amp, model, optimizer, BATCHES[:2])
    checkpoint = saved(amp, model, optimizer)
    del checkpoint["optimizer"]["master_params"]
    for order in (("model", "optimizer"), ("optimizer", "model")):
        other, other_optimizer = prepared(amp, "O2", OPTIMIZERS["Adam"])
        for part in order:
            target = other if part == "model" else other_optimizer
            target.load_state_dict(checkpoint[part])
        first = next(amp.master_params(other_optimizer))
        moment = other_optimizer.state[first]["exp_avg"]
        assert torch.equal(moment, checkpoint["optimizer"]["state"][0]["exp_avg"])
        assert moment.dtype == torch.float32
        other.eval()
        with amp.scale_loss(other(BATCHES[0][0]).sum() * 0.0, other_optimizer) as scaled_loss:
            scaled_loss.backward()
        assert torch.equal(first, model[0].weight.float())


def test_masters_follow_a_model_that_is_loaded_in_training(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2", FusedSGD)
    train_with(amp, model, optimizer, BATCHES[:2])
    exact = next(amp.master_params(optimizer)).detach().clone()
    replaced = model.state_dict()
    replaced["0.weight"][0] = 7.0
    model.load_state_dict(replaced)
    with amp.scale_loss(model(BATCHES[0][0]).sum() * 0.0, optimizer) as scaled_loss:
        scaled_loss.backward()
    master = next(amp.master_params(optimizer))
    assert torch.equal(master[0], torch.full((6,), 7.0))
    assert torch.equal(master[1:], exact[1:])
    assert not torch.equal(exact, exact.half().float())


def test_masters_do_not_replace_a_model_with_other_values(amp: Any) -> None:
    """Only the optimizer is loaded."""
    model, optimizer = prepared(amp, "O2", FusedSGD)
    train_with(amp, model, optimizer, BATCHES[:2])
    state_dict = copy.deepcopy(optimizer.state_dict())
    model, optimizer = prepared(amp, "O2", FusedSGD)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    optimizer.load_state_dict(state_dict)
    with amp.scale_loss(model(BATCHES[0][0]).sum() * 0.0, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert torch.equal(next(amp.master_params(optimizer)), torch.full((8, 6), 0.5))


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "Adam"])
def test_state_from_before_initialize_goes_on_with_the_masters(amp: Any, name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-2)
    cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    states = [copy.deepcopy(optimizer.state[param]) for param in model.parameters()]
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    by_hand = ByHand("O2", lambda params: OPTIMIZERS[name](params, lr=1e-2), 2.0**16, True)
    by_hand.model.load_state_dict(model.state_dict())
    for param, master, state in zip(by_hand.params, by_hand.masters, states, strict=True):
        master.data.copy_(param)
        by_hand.optimizer.state[master] = state
    train_with(amp, model, optimizer, BATCHES[1:3])
    by_hand.train(BATCHES[1:3])
    expected = tensors_of(by_hand.model, by_hand.masters, by_hand.optimizer)
    assert_all_same_bits(all_tensors(amp, model, optimizer), expected)


def test_masters_of_another_model_are_refused(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2", FusedAdam)
    train_with(amp, model, optimizer, BATCHES[:1])
    before = all_tensors(amp, model, optimizer)
    for number, master in ((0, torch.ones(2)), (6, torch.ones(3))):
        state_dict = optimizer.state_dict()
        state_dict["master_params"] = {number: master}
        message = (
            r"FusedAdam.load_state_dict: expected state_dict\['master_params'\] to fit the "
            rf"optimizer's 6 parameters, got number {number} of shape \[{len(master)}\]"
        )
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
    assert_all_same_bits(all_tensors(amp, model, optimizer), before)


# The scales.


def test_another_number_of_losses(amp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(amp, "O1", FusedAdam, num_losses=3)
    for number, scaler in enumerate(amp._amp_state.loss_scalers):
        scaler._loss_scale, scaler._unskipped = 2.0**number, number
    three = amp.state_dict()
    assert list(three) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    assert three["loss_scaler2"] == {"loss_scale": 4.0, "unskipped": 2}
    for count in (1, 4):
        prepared(amp, "O1", FusedAdam, num_losses=count)
        amp._amp_state.verbosity = 1
        amp.load_state_dict(three)
        printed = capsys.readouterr().out
        assert printed.startswith(
            f"Warning: the amp state dict has 3 loss scalers, the program {count}"
        )
        loaded = amp.state_dict()
        common = min(count, 3)
        assert [loaded[f"loss_scaler{n}"] for n in range(common)] == list(three.values())[:common]
        if count == 4:
            assert loaded["loss_scaler3"] == {"loss_scale": 2.0**16, "unskipped": 0}
    amp.load_state_dict(loaded)
    assert capsys.readouterr().out == ""
    assert amp.state_dict({"epoch": 3}) == {"epoch": 3, **loaded}


@pytest.mark.parametrize(
    ("state_dict", "error", "message"),
    [
        ({"loss_scaler0": {}, "model": 3}, RuntimeError, r"keys 'loss_scaler0' and so on, got 'mo"),
        ({"loss_scaler0": 3}, ValueError, r"\['loss_scaler0'\] to have numbers 'loss_scale' and"),
        (
            {"loss_scaler0": {"loss_scale": 1.0}},
            ValueError,
            r"numbers 'loss_scale' and 'unskipped'",
        ),
        (
            {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}},
            *(ValueError, "positive loss_scale and a count of at least 0, got 0.0"),
        ),
    ],
)
def test_foreign_scales_are_refused(
    amp: Any, state_dict: Any, error: type[Exception], message: str
) -> None:
    prepared(amp, "O1", FusedAdam)
    before = amp.state_dict()
    with pytest.raises(error, match=rf"^amp\.load_state_dict: expected state_dict.*{message}"):
        amp.load_state_dict({"loss_scaler00": {"loss_scale": 8.0, "unskipped": 1}, **state_dict})
    assert amp.state_dict() == before
