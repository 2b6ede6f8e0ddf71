# SPDX-License-Identifier: BSD-3-Clause
"""What a program for apex saves and goes on with, and what it reads behind apex.amp."""

from __future__ import annotations

import copy
import importlib
import io
from typing import Any

import pytest
import torch
from support.amp import (
    LEVELS,
    OPTIMIZERS,
    ByHand,
    all_tensors,
    backward,
    make_batches,
    make_model,
    prepared,
    tensors_of,
    train_with,
)
from support.compare import assert_all_same_bits
from torch.nn.functional import cross_entropy

from torchfuse.optimizers import FusedAdam, FusedSGD

BATCHES = make_batches(6)
PARTS = ("model", "optimizer", "amp")


def saved(amp: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """What a program saves, after the way through a file."""
    states = (model.state_dict(), optimizer.state_dict(), amp.state_dict())
    file = io.BytesIO()
    torch.save(dict(zip(PARTS, states, strict=True)), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("order", [PARTS, PARTS[::-1]], ids=["model first", "model last"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_makes_the_same_steps(
    amp: Any, level: str, name: str, order: tuple[str, ...]
) -> None:
    model, optimizer = prepared(amp, level, name)
    overflows = [(1, 0)] if level in ("O1", "O2") else []
    train_with(amp, model, optimizer, BATCHES[:3], overflows)
    checkpoint = saved(amp, model, optimizer)
    train_with(amp, model, optimizer, BATCHES[3:])
    whole, scales = all_tensors(amp, model, optimizer), amp.state_dict()

    torch.manual_seed(9)
    model, optimizer = prepared(amp, level, name)
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # other values than before
    targets = {"model": model, "optimizer": optimizer, "amp": amp}
    for part in order:
        targets[part].load_state_dict(checkpoint[part])
    train_with(amp, model, optimizer, BATCHES[3:])
    assert_all_same_bits(all_tensors(amp, model, optimizer), whole)
    assert amp.state_dict() == scales


@pytest.mark.parametrize("level", LEVELS)
def test_only_the_masters_of_o2_are_added(amp: Any, level: str) -> None:
    model, optimizer = prepared(amp, level)
    assert set(optimizer.state_dict()) - {"master_params"} == {"state", "param_groups"}
    train_with(amp, model, optimizer, BATCHES[:1])
    found = optimizer.state_dict().get("master_params", {})
    # Batch normalization is in fp32 and has none.
    assert set(found) == ({0, 1, 4, 5} if level == "O2" else set())
    for number, master in enumerate(amp.master_params(optimizer)):
        assert number not in found or torch.equal(found[number], master)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["FusedAdam", "Adam"])
def test_a_checkpoint_of_o2_loads_at_every_level(amp: Any, level: str, name: str) -> None:
    model, optimizer = prepared(amp, "O2", name)
    train_with(amp, model, optimizer, BATCHES[:2])
    checkpoint = saved(amp, model, optimizer)
    assert {v.dtype for v in checkpoint["model"].values()} == {torch.float32, torch.int64}
    other, other_optimizer = prepared(amp, level, name)
    other.load_state_dict(checkpoint["model"])
    other_optimizer.load_state_dict(checkpoint["optimizer"])
    assert torch.equal(other[0].weight.float(), model[0].weight.float())
    train_with(amp, other, other_optimizer, BATCHES[2:3])
    # And without amp.
    plain = make_model()
    plain.load_state_dict(checkpoint["model"])
    OPTIMIZERS[name](list(plain.parameters())).load_state_dict(checkpoint["optimizer"])


def test_a_checkpoint_without_masters_keeps_fp32_state(amp: Any) -> None:
    """As apex has saved it; masters come from the model."""
    model, optimizer = prepared(amp, "O2", "Adam")
    train_with(amp, model, optimizer, BATCHES[:2])
    checkpoint = saved(amp, model, optimizer)
    del checkpoint["optimizer"]["master_params"]
    for order in (("model", "optimizer"), ("optimizer", "model")):
        other, other_optimizer = prepared(amp, "O2", "Adam")
        for part in order:
            target = other if part == "model" else other_optimizer
            target.load_state_dict(checkpoint[part])
        first = next(amp.master_params(other_optimizer))
        moment = other_optimizer.state[first]["exp_avg"]
        assert torch.equal(moment, checkpoint["optimizer"]["state"][0]["exp_avg"])
        assert moment.dtype == torch.float32
        other.eval()
        backward(amp, other(BATCHES[0][0]).sum() * 0.0, other_optimizer)
        assert torch.equal(first, model[0].weight.float())


def test_masters_follow_a_model_that_is_loaded_in_training(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2", "FusedSGD")
    train_with(amp, model, optimizer, BATCHES[:2])
    exact = next(amp.master_params(optimizer)).detach().clone()
    replaced = model.state_dict()
    replaced["0.weight"][0] = 7.0
    model.load_state_dict(replaced)
    backward(amp, model(BATCHES[0][0]).sum() * 0.0, optimizer)
    master = next(amp.master_params(optimizer))
    assert torch.equal(master[0], torch.full((6,), 7.0))
    assert torch.equal(master[1:], exact[1:])
    assert not torch.equal(exact, exact.half().float())


def test_masters_do_not_replace_a_model_with_other_values(amp: Any) -> None:
    """Only the optimizer is loaded."""
    model, optimizer = prepared(amp, "O2", "FusedSGD")
    train_with(amp, model, optimizer, BATCHES[:2])
    state_dict = copy.deepcopy(optimizer.state_dict())
    model, optimizer = prepared(amp, "O2", "FusedSGD")
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    optimizer.load_state_dict(state_dict)
    backward(amp, model(BATCHES[0][0]).sum() * 0.0, optimizer)
    assert torch.equal(next(amp.master_params(optimizer)), torch.full((8, 6), 0.5))


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "Adam"])
def test_state_from_before_initialize_goes_on_with_the_masters(amp: Any, name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    states = [copy.deepcopy(optimizer.state[param]) for param in model.parameters()]
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    by_hand = ByHand("O2", OPTIMIZERS[name], 2.0**16, True)
    by_hand.model.load_state_dict(model.state_dict())
    for param, master, state in zip(by_hand.params, by_hand.masters, states, strict=True):
        master.data.copy_(param)
        by_hand.optimizer.state[master] = state
    train_with(amp, model, optimizer, BATCHES[1:3])
    by_hand.train(BATCHES[1:3])
    expected = tensors_of(by_hand.model, by_hand.masters, by_hand.optimizer)
    assert_all_same_bits(all_tensors(amp, model, optimizer), expected)


def test_masters_of_another_model_are_refused(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2")
    train_with(amp, model, optimizer, BATCHES[:1])
    before = all_tensors(amp, model, optimizer)
    for number, master in ((0, torch.ones(2)), (6, torch.ones(3))):
        state_dict = optimizer.state_dict()
        state_dict["master_params"] = {number: master}
        message = (
            r"FusedAdam.load_state_dict: expected state_dict\['master_params'\] to fit the "
            rf"optimizer's 6 parameters, got master {number} of shape \[{len(master)}\]"
        )
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
    assert_all_same_bits(all_tensors(amp, model, optimizer), before)


# The scales.


@pytest.mark.parametrize("count", [1, 4])
def test_another_number_of_losses(amp: Any, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    three = {f"loss_scaler{n}": {"loss_scale": 2.0**n, "unskipped": n} for n in range(3)}
    prepared(amp, "O1", num_losses=count)
    before = amp.state_dict()
    amp._amp_state.verbosity = 1
    amp.load_state_dict(three)
    message = f"Warning: the amp state dict contains 3 loss scalers, but the program uses {count}"
    assert capsys.readouterr().out.startswith(message)
    loaded = amp.state_dict()
    assert loaded == {name: three.get(name, before[name]) for name in before}
    amp.load_state_dict(loaded)
    assert capsys.readouterr().out == ""
    assert amp.state_dict({"epoch": 3}) == {"epoch": 3, **loaded}


@pytest.mark.parametrize(
    ("state_dict", "error", "message"),
    [
        ({"model": 3}, RuntimeError, "keys 'loss_scaler0' and so on, got 'mo"),
        ({"loss_scaler0": 3}, ValueError, r"\['loss_scaler0'\] to have numbers 'loss_scale' and"),
        ({"loss_scaler0": {"loss_scale": 1.0}}, ValueError, "numbers 'loss_scale' and 'unskipped'"),
        (
            {"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}},
            *(ValueError, "positive loss_scale and a count of at least 0, got 0.0"),
        ),
    ],
)
def test_foreign_scales_are_refused(
    amp: Any, state_dict: Any, error: type[Exception], message: str
) -> None:
    prepared(amp, "O1")
    before = amp.state_dict()
    with pytest.raises(error, match=rf"^amp\.load_state_dict: expected state_dict.*{message}"):
        amp.load_state_dict({"loss_scaler00": {"loss_scale": 8.0, "unskipped": 1}, **state_dict})
    assert amp.state_dict() == before


# Masters go on in torchfuse's own optimizers.


def o2_checkpoint(amp: Any, make: Any) -> tuple[dict[str, Any], list[torch.nn.Parameter]]:
    """What an optimizer has saved, and parameters as those of its model."""
    model = make_model()
    optimizer = make(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train_with(amp, model, optimizer, BATCHES[:3])
    own = [torch.nn.Parameter(param.detach().clone()) for param in model.parameters()]
    return saved(amp, model, optimizer)["optimizer"], own


@pytest.mark.parametrize(
    ("make", "target"), [(FusedAdam, FusedAdam), (torch.optim.SGD, FusedSGD)], ids=["Adam", "SGD"]
)
def test_masters_of_o2_move_into_the_own_optimizer(amp: Any, make: Any, target: Any) -> None:
    """A program that leaves apex.amp goes on from the masters, not from the fp16 parameters.

    torch gives SGD without momentum no states; its masters are all that it saves.
    """
    checkpoint, own = o2_checkpoint(amp, make)
    assert bool(checkpoint["state"]) == (make is FusedAdam)
    loaded = target(own, lr=1e-2)
    loaded.load_state_dict(checkpoint)
    masters = checkpoint["master_params"]
    assert len(masters) > 0
    for number, param in enumerate(own):
        kept = loaded.state[param].get("master_param")
        assert (kept is not None) == (number in masters)
        assert kept is None or torch.equal(kept, masters[number])
        param.grad = torch.zeros_like(param)
    loaded.step()
    with_masters = [n for n, p in enumerate(own) if "master_param" in loaded.state[p]]
    assert with_masters == list(masters)


def test_masters_that_do_not_fit_are_refused(amp: Any) -> None:
    checkpoint, own = o2_checkpoint(amp, FusedAdam)
    masters = checkpoint["master_params"]
    for number, message in (
        (0, r"state\[0\]\['master_param'\] to have the shape"),
        (99, r"'master_params'\] to have parameter numbers as keys, got 99"),
    ):
        checkpoint["master_params"] = {**masters, number: torch.zeros(1)}
        with pytest.raises(ValueError, match=message):
            FusedAdam(own).load_state_dict(checkpoint)


# What published programs read and write behind the functions.


def test_the_state_object_hides_its_module(amp: Any) -> None:
    state = amp._amp_state
    assert state is vars(amp)["_amp_state"]
    names: dict[str, Any] = {}
    exec("from apex.amp import _amp_state", names)
    assert names["_amp_state"] is state
    module = importlib.import_module("apex.amp._amp_state")
    assert module._amp_state is state
    assert amp._amp_state is state
    exec("import apex.amp._amp_state; from apex.amp._amp_state import maybe_print", names)
    assert names["apex"].amp._amp_state is state


def test_the_state_before_and_after_initialize(amp: Any) -> None:
    state = amp._amp_state
    assert not hasattr(state, "opt_properties")
    assert not hasattr(state, "loss_scalers")
    assert not state.handle.is_active()
    assert (state.hard_override, state.allow_incoming_model_not_fp32) == (False, False)
    prepared(amp, "O1", num_losses=2, min_loss_scale=2.0, max_loss_scale=1024.0)
    assert (state.verbosity, state.min_loss_scale, state.max_loss_scale) == (0, 2.0, 1024.0)
    assert len(state.loss_scalers) == 2
    assert state.handle.is_active()
    prepared(amp, "O2")
    assert not state.handle.is_active()


def test_options_by_name(amp: Any) -> None:
    options = {"keep_batchnorm_fp32": "False", "loss_scale": "64", "master_weights": "False"}
    prepared(amp, "O2", **options)
    properties = amp._amp_state.opt_properties
    assert properties.options == {
        **{"enabled": True, "opt_level": "O2", "cast_model_type": torch.float16},
        **{"patch_torch_functions": False, "patch_torch_functions_type": None},
        **{"keep_batchnorm_fp32": False, "master_weights": False, "loss_scale": 64.0},
    }
    assert {name: getattr(properties, name) for name in properties.options} == properties.options
    assert set(properties.options) <= set(dir(properties))
    properties.loss_scale = "dynamic"
    assert properties.options["loss_scale"] == "dynamic"
    with pytest.raises(ValueError, match="expected loss_scale to be"):
        properties.loss_scale = "none"
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = properties.missing


def test_the_options_are_printed(amp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(make_model(), opt_level="O2", loss_scale="128.0")
    printed = capsys.readouterr().out
    assert printed.startswith("apex.amp by torchfuse: opt_level O2\n")
    assert "loss_scale                 : 128.0  (set by the program)\n" in printed
    assert "master_weights             : True\n" in printed
    prepared(amp, "O2")
    assert capsys.readouterr().out == ""


def test_masters_can_be_made_and_set_early(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2")
    train_with(amp, model, optimizer, BATCHES[:2])
    states = model.state_dict(), optimizer.state_dict(), list(amp.master_params(optimizer))
    of_model, of_optimizer, masters = copy.deepcopy(states)
    del of_optimizer["master_params"]
    train_with(amp, model, optimizer, BATCHES[2:])
    whole = all_tensors(amp, model, optimizer)

    model, optimizer = prepared(amp, "O2")
    model.load_state_dict(of_model)
    assert not optimizer._amp_stash.lazy_init_called
    assert next(amp.master_params(optimizer)) is model[0].weight
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(of_optimizer)
    for param, master in zip(amp.master_params(optimizer), masters, strict=True):
        assert param.dtype == torch.float32
        param.data.copy_(master.data)
    train_with(amp, model, optimizer, BATCHES[2:])
    assert_all_same_bits(all_tensors(amp, model, optimizer), whole)


def test_lists_of_parameters(amp: Any) -> None:
    model = make_model()
    layers = [list(model[0].parameters()), [*model[1].parameters(), *model[3].parameters()]]
    optimizer: Any = FusedAdam([{"params": params} for params in layers])
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train_with(amp, model, optimizer, BATCHES[:1])
    stash = optimizer._amp_stash
    short = [p for p in model.parameters() if p.dtype == torch.float16]
    assert [id(p) for p in stash.all_fp16_params] == [id(p) for p in short]
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        assert torch.equal(master.half(), param)
    groups = *stash.fp16_groups, *stash.fp32_from_fp16_groups
    assert [len(group) for group in groups] == [2, 2, 2, 2]
    _, plain = prepared(amp, "O1")
    plain._lazy_init_maybe_master_weights()
    assert (len(plain._amp_stash.all_fp32_params), plain._amp_stash.all_fp16_params) == (6, [])
    assert plain._amp_stash.lazy_init_called
