# SPDX-License-Identifier: BSD-3-Clause
"""apex.fp16_utils: FP16_Optimizer against the loop by hand, networks, masters, loss scalers."""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.amp import OPTIMIZERS, ByHand, make_batches, spoil, tensors_of
from support.compare import assert_all_same_bits
from torch import Tensor, nn

from torchfuse.apex.fp16_utils import (
    DynamicLossScaler,
    FP16_Optimizer,
    model_grads_to_master_grads,
)

BATCHES = make_batches(5)
adam, sgd = OPTIMIZERS["FusedAdam"], OPTIMIZERS["SGD"]
DYNAMIC: Any = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10}}


def prepared(make: Callable[[Any], Any], **options: Any) -> tuple[ByHand, Any]:
    """A model in fp16 with fp32 batch normalization, and its optimizer."""
    model = ByHand("O2", sgd, 1.0, False)
    return model, FP16_Optimizer(make(list(model.model.parameters())), verbose=False, **options)


def train(model: ByHand, optimizer: Any, batches: Any, overflows: Any = ()) -> None:
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        optimizer.backward(model.loss(*batch), update_master_grads=False)
        if index in overflows:
            spoil(model.model, 0)
        optimizer.update_master_grads()
        optimizer.step()


def all_tensors(model: ByHand, optimizer: Any) -> dict[str, torch.Tensor]:
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    return tensors_of(model.model, masters, optimizer.optimizer)


@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize(
    ("options", "scale", "overflows"),
    [({}, 1.0, []), ({"static_loss_scale": 128.0}, 128.0, []), (DYNAMIC, 2.0**10, [0, 2, 3])],
)
def test_it_trains_as_by_hand(
    make: Any, options: dict[str, Any], scale: float, overflows: list[int]
) -> None:
    by_hand = ByHand("O2", make, scale, "dynamic_loss_scale" in options)
    by_hand.train(BATCHES, [(index, 0) for index in overflows])
    model, optimizer = prepared(make, **options)
    train(model, optimizer, BATCHES, overflows)
    expected = tensors_of(by_hand.model, by_hand.masters, by_hand.optimizer)
    assert_all_same_bits(all_tensors(model, optimizer), expected)
    assert optimizer.loss_scale == by_hand.scale
    assert by_hand.skipped == overflows


def test_a_skip_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = prepared(sgd, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0})
    train(model, optimizer, BATCHES[:1], [0])
    assert (capsys.readouterr().out, optimizer.overflow) == ("", True)
    assert optimizer.clip_master_grads(1.0) == -1
    optimizer.verbose = True
    train(model, optimizer, BATCHES[:1], [0])
    assert capsys.readouterr().out == (
        "Gradient overflow: skipped a step of FP16_Optimizer. The loss scale was 4.0 and is now "
        "2.0.\n"
    )
    assert optimizer.inspect_master_grad_data() is None


def test_clipping_and_looking_at_gradients() -> None:
    model, optimizer = prepared(sgd, static_loss_scale=64.0)
    optimizer.zero_grad()
    optimizer.backward(model.loss(*BATCHES[0]))
    grads = optimizer.inspect_master_grad_data()
    assert [grad.dtype for grad in grads[0]] == [torch.float32] * 6
    expected = torch.cat([grad.reshape(-1) for grad in grads[0]]).norm()
    torch.testing.assert_close(optimizer.clip_master_grads(1e-3), expected)
    clipped = torch.cat([grad.reshape(-1) for grad in optimizer.inspect_master_grad_data()[0]])
    torch.testing.assert_close(clipped.norm(), torch.tensor(1e-3), rtol=1e-3, atol=0)


@pytest.mark.parametrize("to_none", [False, True])
def test_zero_grad(to_none: bool) -> None:
    model, optimizer = prepared(sgd)
    optimizer.backward(model.loss(*BATCHES[0]))
    optimizer.zero_grad(set_grads_to_None=to_none)
    for param in model.model.parameters():
        assert (param.grad is None) if to_none else not param.grad.any()
    assert all(master.grad is None for master in optimizer.fp32_from_fp16_groups[0])


def test_a_closure_runs_again_after_an_overflow() -> None:
    make = partial(torch.optim.LBFGS, lr=0.1, max_iter=2)
    model, optimizer = prepared(make, **DYNAMIC)
    calls: list[float] = []

    def pairs() -> Any:
        return zip(optimizer.fp16_groups[0], optimizer.fp32_from_fp16_groups[0], strict=True)

    def closure() -> Any:
        calls.append(optimizer.loss_scale)
        assert all(torch.equal(param, master.half()) for param, master in pairs())
        optimizer.zero_grad()
        loss = model.loss(*BATCHES[0])
        optimizer.backward(loss, update_master_grads=False)
        if len(calls) == 2:
            spoil(model.model, 3)
        optimizer.update_master_grads()
        return loss

    optimizer.step(closure)
    assert calls == [2.0**10, 2.0**10, 2.0**9]
    assert all(param.isfinite().all() for param in model.model.parameters())
    assert all(torch.equal(param, master.half()) for param, master in pairs())


# Checkpoints.


@pytest.mark.parametrize(("make", "options"), [(adam, {"static_loss_scale": 64.0}), (sgd, DYNAMIC)])
def test_a_resumed_run_makes_the_same_steps(make: Any, options: dict[str, Any]) -> None:
    model, optimizer = prepared(make, **options)
    train(model, optimizer, BATCHES[:3], [1])
    file = io.BytesIO()
    torch.save({"model": model.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, BATCHES[3:])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert set(saved["optimizer"]) == {
        *("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step"),
        *("optimizer_state_dict", "fp32_from_fp16"),
    }
    other, other_optimizer = prepared(make)
    other.model.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    train(other, other_optimizer, BATCHES[3:])
    assert_all_same_bits(all_tensors(other, other_optimizer), all_tensors(model, optimizer))
    assert other_optimizer.loss_scale == optimizer.loss_scale


def test_apexs_pickled_scaler_is_read() -> None:
    model, optimizer = prepared(adam, **DYNAMIC)
    train(model, optimizer, BATCHES[:1])
    state_dict = optimizer.state_dict()
    pickled = DynamicLossScaler(init_scale=32.0, scale_window=7)
    pickled.cur_iter = 5
    optimizer.load_state_dict({**state_dict, "loss_scaler": pickled})
    assert optimizer.loss_scaler.state_dict() == vars(pickled)
    assert optimizer.loss_scaler is not pickled


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="FP16_Optimizer: expected init_optimizer to be a"):
        FP16_Optimizer(nn.Linear(1, 1))
    model, optimizer = prepared(adam, **DYNAMIC)
    train(model, optimizer, BATCHES[:1])
    before = all_tensors(model, optimizer)
    state_dict = optimizer.state_dict()
    for key in state_dict:
        missing = {name: value for name, value in state_dict.items() if name != key}
        with pytest.raises(KeyError, match=rf"expected state_dict to have '{key}', got only"):
            optimizer.load_state_dict(missing)
    other = {**state_dict, "fp32_from_fp16": [[torch.ones(2)]]}
    with pytest.raises(
        ValueError, match=r"\['fp32_from_fp16'\] to have the shapes .*got \[\[\[2\]"
    ):
        optimizer.load_state_dict(other)
    assert_all_same_bits(all_tensors(model, optimizer), before)
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scaler.cur_scale == 4.0
    assert optimizer.state is optimizer.optimizer.state


def test_programs_may_edit_the_lists_and_reorder_the_groups() -> None:
    model, optimizer = prepared(adam)
    train(model, optimizer, BATCHES[:1])
    optimizer.param_groups[0]["params"].reverse()
    before = all_tensors(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_all_same_bits(all_tensors(model, optimizer), before)
    optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.state_dict()["fp32_from_fp16"]) == 1

    frozen, trained = optimizer.fp16_groups[0][:2]
    values = frozen.detach().clone(), trained.detach().clone()
    optimizer.fp16_groups = [optimizer.fp16_groups[0][1:]]
    del optimizer.fp32_from_fp16_groups[0][0]
    train(model, optimizer, BATCHES[1:])
    assert torch.equal(frozen, values[0])
    assert not torch.equal(trained, values[1])


@pytest.mark.parametrize("alone", [True, False])
def test_gradients_that_have_not_reached_the_masters_are_refused(alone: bool) -> None:
    model, optimizer = prepared(sgd)
    train(model, optimizer, BATCHES[:1])
    model.model.eval()
    before = tensors_of(model.model, [], optimizer)
    optimizer.zero_grad()
    loss = model.loss(*BATCHES[1])
    if alone:
        loss.backward()
    else:
        optimizer.backward(loss, update_master_grads=False)
    message = r"FP16_Optimizer\.step: expected gradients from optimizer\.backward\(loss\) since the"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_all_same_bits(tensors_of(model.model, [], optimizer), before)
    optimizer.update_master_grads()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), "dynamic", None, True])
def test_loss_scales_out_of_range(scale: Any) -> None:
    message = f"Scaler: expected scale to be a positive, finite number, got {scale!r}"
    with pytest.raises(ValueError, match=message):
        prepared(sgd, static_loss_scale=scale)
    with pytest.raises(ValueError, match=message):
        prepared(sgd, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": scale})


def test_gradients_that_the_program_copied_itself_are_used() -> None:
    model, optimizer = prepared(sgd)
    optimizer.zero_grad()
    model.loss(*BATCHES[0]).backward()
    for models, masters in zip(optimizer.fp16_groups, optimizer.fp32_from_fp16_groups, strict=True):
        model_grads_to_master_grads(models, masters)
    before = model.model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.model[0].weight, before)


@pytest.fixture
def fp16_utils(installed: None) -> Any:
    return importlib.import_module("apex.fp16_utils")


def make_network() -> Any:
    torch.manual_seed(2)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)
    return nn.Sequential(*layers)


# Networks.

DATA = torch.ones(5, 3)


def dtypes(network: Any) -> list[Any]:
    return [network[0].weight.dtype, network[1].weight.dtype, network[2].running_var.dtype]


def test_networks_in_fp16(fp16_utils: Any) -> None:
    half, full = torch.float16, torch.float32
    network = make_network()
    assert fp16_utils.convert_network(network, half) is network
    assert dtypes(network) == [half, full, half]
    network = fp16_utils.network_to_half(make_network())
    assert dtypes(network[1]) == [half, full, half]
    assert network(DATA).dtype == half
    wrapped = fp16_utils.FP16Model(make_network())
    assert dtypes(wrapped.network) == [half, full, half]
    assert wrapped(DATA).dtype == half
    network = make_network()
    fp16_utils.convert_module(network, half)  # it has no parameters of its own
    assert dtypes(network) == [full, full, full]
    network[0].weight.grad = torch.ones(4, 3)
    fp16_utils.convert_module(network[0], half)
    assert (dtypes(network)[0], network[0].weight.grad.dtype) == (half, half)
    fp16_utils.BN_convert_float(network.half())
    assert dtypes(network) == [half, full, half]
    assert fp16_utils.tofp16()(DATA).dtype == half


# Masters.


@pytest.mark.parametrize("flat", [False, True])
def test_a_step_of_masters_by_hand(fp16_utils: Any, flat: bool) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    start = [param.detach().float() for param in model.parameters()]
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert len(masters) == (1 if flat else len(params))
    assert {master.dtype for master in masters} == {torch.float32}
    optimizer = torch.optim.SGD(masters, lr=0.125)
    model(DATA.half()).float().square().sum().backward()
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
    optimizer.step()
    fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    for param, value in zip(params, start, strict=True):
        assert torch.equal(param, (value - 0.125 * param.grad.float()).half())
    params[0].grad = None
    if flat:
        with pytest.raises(ValueError, match=r"model_params\[0\] to have a gradient"):
            fp16_utils.model_grads_to_master_grads(params, masters, flat_master=True)
    else:
        fp16_utils.model_grads_to_master_grads(params, masters)
        assert masters[0].grad is None


def test_frozen_parameters_have_no_master(fp16_utils: Any) -> None:
    model = nn.Linear(3, 4).half()
    model.bias.requires_grad_(False)
    params, masters = fp16_utils.prep_param_lists(model)
    assert [param is model.weight for param in params] == [True]
    assert len(masters) == 1
    mixed = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    message = r"prep_param_lists: expected parameters of one dtype with flat_master=True, got \["
    with pytest.raises(ValueError, match=message):
        fp16_utils.prep_param_lists(mixed, flat_master=True)


# Loss scalers.


def test_a_constant_scale(fp16_utils: Any) -> None:
    scaler = fp16_utils.LossScaler(64.0)
    weight = nn.Parameter(torch.ones(2))
    scaler.backward(weight.sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [64.0, 64.0]
    weight.grad.fill_(float("nan"))
    assert not scaler.has_overflow([weight])
    scaler.update_scale(True)
    assert scaler.loss_scale == 64.0
    assert scaler.scale_gradient(None, (torch.ones(1),), None)[0].tolist() == [64.0]


def test_the_rule_of_a_dynamic_scale(fp16_utils: Any) -> None:
    scaler = fp16_utils.DynamicLossScaler()
    assert (scaler.loss_scale, scaler.scale_factor, scaler.scale_window) == (2.0**32, 2.0, 1000)
    scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_factor=4.0, scale_window=3)
    scales = []
    for overflow in (*(False,) * 3, True, *(False,) * 4, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    # It grows in the third update after an overflow, which counts from -1 at first; at least 1.
    assert scales == [4.0, 4.0, 16.0, 4.0, 4.0, 4.0, 16.0, 16.0, 4.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "dtype"), [("inf", torch.float16), ("-inf", torch.float32), ("nan", torch.float16)]
)
def test_overflow_is_found(fp16_utils: Any, value: str, dtype: torch.dtype) -> None:
    scaler = fp16_utils.DynamicLossScaler()
    params: list[Tensor] = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(3)]
    assert not scaler.has_overflow(params)
    for param in params[1:]:
        param.grad = torch.full((3,), 6e4, dtype=dtype)
    assert not scaler.has_overflow(params)
    assert params[2].grad is not None
    params[2].grad[1] = float(value)
    assert scaler.has_overflow(params)


def test_functions_beside(fp16_utils: Any) -> None:
    for value in (3.0, torch.tensor(3.0), torch.tensor([3.0]), [3.0]):
        assert fp16_utils.to_python_float(value) == 3.0
    assert fp16_utils.clip_grad_norm is torch.nn.utils.clip_grad_norm_
    module = importlib.import_module("apex.optimizers.fp16_optimizer")
    assert module.FP16_Optimizer is fp16_utils.FP16_Optimizer
