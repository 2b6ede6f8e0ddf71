# SPDX-License-Identifier: BSD-3-Clause
"""Averages of the parameters: options and tensors that are refused, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedAdam, FusedSGD
from torchfuse.parallel import LARC

DECAY = 0.9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ema_decay": 1.0}, ValueError, "ema_decay of group 0 to be None, or at least 0 and less "
         r"than 1, got 1\.0"),
        ({"ema_decay": -0.1}, ValueError, r"ema_decay of group 0 .* got -0\.1"),
        ({"ema_decay": float("nan")}, ValueError, "ema_decay of group 0 .* got nan"),
        ({"ema_decay": "0.9"}, TypeError, "ema_decay of group 0 to be None or a number, got str"),
        ({"ema_start_step": -1}, ValueError, "ema_start_step of group 0 to be at least 0 .*got -1"),
        ({"ema_start_step": 1.5}, TypeError, "ema_start_step of group 0 to be a whole number, got "
         "float"),
        ({"ema_warmup": 2}, TypeError, "ema_warmup of group 0 to be a bool, got 2"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"FusedAdam: expected {message}"):
        FusedAdam(make_params(), **{"ema_decay": DECAY, **options})
    params = make_params()
    optimizer = FusedAdam(params, ema_decay=DECAY)
    optimizer.param_groups[0].update(options)
    set_grads(params, random_grads(params, 0))
    before = snapshot(optimizer)
    with pytest.raises(error, match=rf"FusedAdam\.step: expected {message}"):
        optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)


def test_groups_share_the_options() -> None:
    first, second = make_params(), make_params()
    optimizer = FusedAdam([{"params": first}], ema_decay=DECAY)
    optimizer.add_param_group({"params": second})
    assert optimizer.param_groups[1]["ema_decay"] == DECAY
    with pytest.raises(ValueError, match=r"expected ema_decay of group 1 to be 0\.9 as in group 0"):
        FusedAdam([{"params": first}, {"params": second, "ema_decay": 0.5}], ema_decay=DECAY)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(2), r"to have the sizes of params, \[7\], got \[2\]"),
        (
            torch.zeros(7, dtype=torch.float16),
            "to be of dtype float32, as its parameter is not float64, got Half",
        ),
    ],
)
def test_an_average_that_does_not_fit_is_refused_by_name(bad: Tensor, message: str) -> None:
    params = make_params(((7,),))
    optimizer = FusedAdam(params, ema_decay=DECAY)
    set_grads(params, random_grads(params, 0))
    optimizer.step()
    optimizer.state[params[0]]["ema_param"] = bad
    before = params[0].detach().clone()
    with pytest.raises(
        RuntimeError,
        match=rf"FusedAdam\.step: expected ema_param of params\[0\] of group 0 {message}",
    ):
        optimizer.step()
    assert_same_bits(params[0], before)


# --- Parameters in the place of their averages ----------------------------------------------------


def stepped(*params: Any) -> FusedSGD:
    optimizer = FusedSGD(params, lr=0.5, ema_decay=DECAY)
    set_grads(params, [torch.ones_like(p) for p in params])
    optimizer.step()
    return optimizer


def test_an_exchange_back_that_fails_is_continued() -> None:
    params = [torch.nn.Parameter(torch.arange(2.0)) for _ in range(3)]
    optimizer = stepped(*params)
    before = snapshot(optimizer)
    optimizer.swap_ema_()
    params[1].data = params[1].data.double()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"swap_ema_: expected the parameter of shape \[2\] to"
        ):
            optimizer.swap_ema_()
    params[1].data = params[1].data.float()
    optimizer.swap_ema_()
    assert_all_same_bits(snapshot(optimizer), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_one_memory_get_their_value_back(dtype: torch.dtype) -> None:
    a, b = (torch.nn.Parameter(torch.arange(3.0).to(dtype)) for _ in range(2))
    optimizer = stepped(a, b)
    b.data = a.data  # a step would refuse it
    before = snapshot(optimizer)
    with optimizer.ema_weights():
        pass
    assert_all_same_bits(snapshot(optimizer), before)


@pytest.mark.parametrize(
    ("own", "other"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)]
)
def test_a_model_that_is_converted_in_between_is_refused(
    own: torch.dtype, other: torch.dtype
) -> None:
    model = torch.nn.Linear(2, 2).to(own)
    optimizer = stepped(*model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    message = rf"to stay {own} while .* got {other}. Convert the model back"
    with pytest.raises(RuntimeError, match=message), optimizer.ema_weights():
        model.to(other)
    model.to(own)
    optimizer.swap_ema_()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("loads", [False, True])
def test_states_of_inference_mode_can_be_exchanged(loads: bool) -> None:
    param = torch.nn.Parameter(torch.arange(3.0))
    optimizer = stepped(param)
    with torch.inference_mode():
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            optimizer.state.clear()
            optimizer.step()
    before = snapshot(optimizer)
    with optimizer.ema_weights():
        assert torch.equal(param, before["ema_param[0]"])
    assert_all_same_bits(snapshot(optimizer), before)


@pytest.mark.parametrize("around", [lambda optimizer: optimizer, LARC])
def test_a_refused_step_does_not_call_its_closure(around: Any) -> None:
    optimizer = around(stepped(torch.nn.Parameter(torch.ones(2))))

    def closure() -> float:
        raise AssertionError("called")

    with (
        optimizer.ema_weights(),
        pytest.raises(RuntimeError, match=r"FusedSGD\.step: expected the"),
    ):
        optimizer.step(closure)


def test_larc_has_the_averages_of_the_optimizer_inside() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = LARC(stepped(param))
    before = param.detach().clone()
    optimizer.swap_ema_()
    assert not torch.equal(param, before)
    optimizer.swap_ema_()
    assert torch.equal(param, before)
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'ema_weights'"):
        LARC(torch.optim.SGD([param])).ema_weights()
