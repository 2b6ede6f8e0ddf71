# SPDX-License-Identifier: BSD-3-Clause
"""A step's plan follows what a program does to parameters, gradients and states in between.

FusedAdam stands for all, with torch's as the reference, to which the same is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import Config, clone_params, make_params, random_grads, set_grads, train
from support.compare import assert_same_bits

from torchfuse.testing import assert_close_to_torch

CONFIG = Config(weight_decay=0.1)


def move_a_parameter(optimizer: Any, params: list[Any]) -> None:
    params[1].data = params[1].data.clone() * 0.5


def replace_a_state(name: str) -> Callable[[Any, list[Any]], None]:
    def edit(optimizer: Any, params: list[Any]) -> None:
        state = optimizer.state[params[1]]
        state[name] = state[name].clone() * 2

    return edit


def offload(optimizer: Any, params: list[Any]) -> None:
    """The tensors are emptied between steps, and their values come back in new ones."""
    for param in params:
        state = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            kept = state[name].clone()
            state[name].fill_(float("nan"))
            state[name] = kept


def replace_states(optimizer: Any, params: list[Any]) -> None:
    for param in params:
        state = optimizer.state[param]
        optimizer.state[param] = {name: value.clone() for name, value in state.items()}


def delete_a_state(optimizer: Any, params: list[Any]) -> None:
    del optimizer.state[params[2]]


def clear_states(optimizer: Any, params: list[Any]) -> None:
    optimizer.state.clear()


def load_without_a_state(optimizer: Any, params: list[Any]) -> None:
    state_dict = optimizer.state_dict()
    del state_dict["state"][1]
    optimizer.load_state_dict(state_dict)


def remove_a_parameter(optimizer: Any, params: list[Any]) -> None:
    del optimizer.param_groups[0]["params"][1], params[1]


def become_fp64_with_its_state(optimizer: Any, params: list[Any]) -> None:
    for param in params:
        param.grad = None
        param.data = param.data.double()
    optimizer.load_state_dict(optimizer.state_dict())


EDITS = [
    move_a_parameter,
    *map(replace_a_state, ("exp_avg", "exp_avg_sq", "step")),
    offload,
    replace_states,
    delete_a_state,
    clear_states,
    load_without_a_state,
    remove_a_parameter,
    become_fp64_with_its_state,
]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_steps_is_seen(edit: Any, device: str) -> None:
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    for optimizer, own in ((ours, params), (torchs, reference)):
        train(optimizer, own, range(3))
    old = [params[1].data, *ours.state[params[1]].values()]
    for optimizer, own in ((ours, params), (torchs, reference)):
        edit(optimizer, own)
    kept = [tensor.clone() for tensor in old]
    in_use = [params[1].data, *ours.state.get(params[1], {}).values()]
    for optimizer, own in ((ours, params), (torchs, reference)):
        train(optimizer, own, range(3, 6))
    assert_close_to_torch(params, reference)
    for param, other in zip(params, reference, strict=True):
        assert float(ours.state[param]["step"]) == float(torchs.state[other]["step"])
    # A scalar of the counts' buffer may be given to another parameter.
    for tensor, before in zip(old, kept, strict=True):
        if tensor.dim() and not any(tensor.data_ptr() == t.data_ptr() for t in in_use):
            assert_same_bits(tensor, before, "memory that is no longer used")


def test_states_and_masters_are_laid_out_anew_with_their_parameter() -> None:
    """torch's fused Adam keeps the old strides and is silently wrong; the for-loop is right."""
    params = make_params([(4, 3, 5, 6)], dtype=torch.bfloat16)
    reference = clone_params(params, torch.float32)
    ours, torchs = CONFIG.ours(params, master_weights=True), CONFIG.torch(reference)
    formats = (torch.channels_last, torch.contiguous_format, torch.channels_last)
    for seed, memory_format in enumerate(formats):
        before = dict(ours.state[params[0]])
        grads = random_grads(params, seed)
        set_grads(params, grads)
        set_grads(reference, [grad.float() for grad in grads])
        ours.step()
        torchs.step()
        for name, value in ours.state[params[0]].items():
            assert seed == 0 or value is before[name], name
            assert name == "step" or value.stride() == params[0].stride(), name
        for param in (params[0], reference[0]):
            param.grad = None
            param.data = param.data.to(memory_format=memory_format)
    assert_close_to_torch([ours.state[params[0]]["master_param"]], reference)


def test_a_model_that_becomes_bf16_keeps_fp32_moments() -> None:
    params = make_params([(64,)])
    optimizer = CONFIG.ours(params)
    train(optimizer, params, range(3))
    moments = optimizer.state[params[0]]["exp_avg"].clone()
    params[0].grad = None
    params[0].data = params[0].data.bfloat16()
    train(optimizer, params, [3])
    state = optimizer.state[params[0]]
    assert params[0].dtype == torch.bfloat16
    expected = moments + (1 - 0.9) * (params[0].grad.float() - moments)
    torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_of_gradients_may_change_between_steps(dtype: torch.dtype) -> None:
    params = make_params([(65,), (8, 3)], dtype=dtype)
    reference = clone_params(params, torch.float64)
    ours, torchs = CONFIG.ours(params, master_weights=True), CONFIG.torch(reference)
    for param in params:
        param.grad_dtype = None
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16)
    for seed, kind in enumerate(kinds):
        grads = [grad.to(kind) for grad in random_grads(params, seed)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        set_grads(reference, grads)
        ours.step()
        torchs.step()
    found = [ours.state[param].get("master_param", param) for param in params]
    assert_close_to_torch(found, reference)
