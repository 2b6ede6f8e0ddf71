# SPDX-License-Identifier: BSD-3-Clause
"""apex.fp16_utils: networks in fp16, lists of masters, loss scalers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def fp16_utils(installed: None) -> Any:
    return importlib.import_module("apex.fp16_utils")


def make_network() -> Any:
    torch.manual_seed(2)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)
    return nn.Sequential(*layers)


DATA = torch.ones(5, 3)


# Networks.


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
