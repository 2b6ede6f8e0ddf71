# SPDX-License-Identifier: BSD-3-Clause
"""Averages of the parameters that the step keeps: formula, evaluation with them, checkpoints."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.adam import (
    DEFAULT_SHAPES,
    make_params,
    params_of,
    random_grads,
    set_grads,
    snapshot,
    train,
)
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedAdam, FusedOptimizer, FusedSGD
from torchfuse.optimizers.state import master_of
from torchfuse.parallel import LARC
from torchfuse.testing import OPTIM_SPECS, OptimSpec, assert_bitwise_equal

SHAPES = (*DEFAULT_SHAPES, (0,), (1,))
DECAY = 0.75
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
MASTERS: dict[str, Any] = {"master_weights": True}
REMAINDERS: dict[str, Any] = {**MASTERS, "store_param_remainders": True}
EXACT: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (F32, {}),
    "fp64": (F64, {}),
    "fp16-master": (F16, MASTERS),
    "bf16-master": (BF16, MASTERS),
    "bf16-remainder": (BF16, REMAINDERS),
    "fp32-bf16-state": (F32, {"state_dtype": BF16}),
}
ROUNDED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp16": (F16, {}),
    "bf16": (BF16, {}),
    "bf16-stochastic": (BF16, {"stochastic_rounding": True}),
}
STORED = {**EXACT, **ROUNDED}
every_optimizer = pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.algorithm)
every_storage = pytest.mark.parametrize("stored", STORED)


def made(spec: OptimSpec, stored: str, **options: Any) -> tuple[FusedOptimizer, list[Any]]:
    dtype, storage = STORED[stored]
    params = make_params(SHAPES, dtype)
    options = {**spec.grid[-1], **storage, "ema_decay": DECAY, **options}
    return spec.optimizer(params, **options), params


def trained(stored: str = "fp32", **options: Any) -> tuple[FusedOptimizer, list[Any]]:
    optimizer, params = made(OPTIM_SPECS[0], stored, **{"lr": 0.1, **options})
    train(optimizer, params, range(3))
    return optimizer, params


def stepped(*params: Any) -> FusedSGD:
    optimizer = FusedSGD(params, lr=0.5, ema_decay=DECAY)
    set_grads(params, [torch.ones_like(p) for p in params])
    optimizer.step()
    return optimizer


def exact_values(optimizer: FusedOptimizer, params: Sequence[Tensor]) -> list[Tensor]:
    """The parameters as the step computes them: masters, where there are any."""
    masters = [master_of(p, optimizer.state.get(p, {})) for p in params]
    return [
        (p.detach() if master is None else master).to(F64, copy=True)
        for p, master in zip(params, masters, strict=True)
    ]


def averages(optimizer: FusedOptimizer, params: Sequence[Tensor]) -> list[Tensor]:
    return [optimizer.state[p]["ema_param"] for p in params]


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- The formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", EXACT)
@every_optimizer
@pytest.mark.parametrize(("warmup", "start"), [(False, 0), (True, 0), (True, 3)])
def test_every_step_gives_the_formula_in_fp64(
    spec: OptimSpec, stored: str, warmup: bool, start: int
) -> None:
    optimizer, params = made(spec, stored, ema_warmup=warmup, ema_start_step=start)
    expected = exact_values(optimizer, params)
    for count in range(1, 13):
        train(optimizer, params, [count])
        n = count - start
        decay = min(DECAY, (1 + n) / (10 + n)) if warmup else DECAY
        for average, value in zip(expected, exact_values(optimizer, params), strict=True):
            average.copy_(value if n <= 0 else decay * average + (1 - decay) * value)
        for average, ema, param in zip(expected, averages(optimizer, params), params, strict=True):
            assert ema.dtype == (F64 if param.dtype == F64 else F32)
            tolerance = 1e-14 if ema.dtype == F64 else 5e-7
            torch.testing.assert_close(ema.double(), average, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stored", ROUNDED)
def test_averages_take_values_before_they_are_rounded(stored: str) -> None:
    optimizer, params = made(OPTIM_SPECS[0], stored)
    # The same step with a master begins with the same values and keeps them.
    exact, masters = made(OPTIM_SPECS[0], f"{stored[:4]}-master")
    train(optimizer, params, [1])
    train(exact, masters, [1])
    assert_bitwise_equal(averages(optimizer, params), averages(exact, masters))


def test_averages_that_are_turned_off_or_have_no_gradient_stay_as_they_are() -> None:
    optimizer, params = trained(ema_warmup=True)
    before = [ema.clone() for ema in averages(optimizer, params)]
    version = averages(optimizer, params)[0]._version
    set_grads(params, random_grads(params, 1))
    params[1].grad = None
    optimizer.step()
    after = averages(optimizer, params)
    assert_same_bits(after[1], before[1])
    assert not torch.equal(after[0], before[0])
    assert after[0]._version == version + 1
    optimizer.ema_decay = None
    before = [ema.clone() for ema in after]
    train(optimizer, params, [4])
    assert_bitwise_equal(averages(optimizer, params), before)


def test_averages_begin_in_the_middle_with_the_parameters_of_that_moment() -> None:
    optimizer, params = trained("bf16-master", ema_decay=None)
    assert "ema_param" not in optimizer.state[params[0]]
    with torch.no_grad():
        params[0].fill_(3.0)  # its master follows
    before = exact_values(optimizer, params)
    before[0].fill_(3.0)
    optimizer.ema_decay = DECAY
    train(optimizer, params, [4])
    after = exact_values(optimizer, params)
    for ema, value, now in zip(averages(optimizer, params), before, after, strict=True):
        expected = DECAY * value + (1 - DECAY) * now
        torch.testing.assert_close(ema.double(), expected, rtol=5e-7, atol=5e-7)


def test_layouts_of_averages_follow_the_parameters() -> None:
    values = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    param: Tensor = torch.nn.Parameter(values.clone())
    optimizer = FusedAdam([param], lr=0.1, ema_decay=DECAY)
    train(optimizer, [param], [0])
    ema = optimizer.state[param]["ema_param"]
    assert ema.stride() == param.stride()
    torch.testing.assert_close(ema, DECAY * values + (1 - DECAY) * param.detach())


# --- Options and tensors that are refused --------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(2), r"to have the sizes of params, \[3, 4, 5, 2\], got \[2\]"),
        (torch.zeros(3, 4, 5, 2, dtype=F16), "to be of dtype float32, as its parameter is not"),
    ],
)
def test_an_average_that_does_not_fit_leaves_everything_as_it_is(bad: Tensor, message: str) -> None:
    optimizer, params = trained()
    optimizer.state[params[3]]["ema_param"] = bad
    before = snapshot(optimizer)
    name = r"FusedAdam\.step: expected ema_param of params\[3\] of group 0"
    with pytest.raises(RuntimeError, match=f"{name} {message}"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"swap_ema_: expected ema to "):
        optimizer.swap_ema_()
    assert_all_same_bits(snapshot(optimizer), before)


def test_without_averages_there_is_nothing_to_swap() -> None:
    message = r"FusedAdam\.swap_ema_: expected ema_decay to be a number, got None"
    with pytest.raises(RuntimeError, match=message):
        FusedAdam(make_params()).swap_ema_()


# --- Parameters in the place of their averages ---------------------------------------------------


@every_storage
@every_optimizer
def test_parameters_hold_their_averages_and_get_their_values_back(
    spec: OptimSpec, stored: str
) -> None:
    (optimizer, params), (other, others) = (made(spec, stored) for _ in range(2))
    for each, tensors in ((optimizer, params), (other, others)):
        train(each, tensors, range(3))
    before = snapshot(optimizer)
    with optimizer.ema_weights():
        for index, param in enumerate(params_of(optimizer)):
            assert_same_bits(param, before[f"ema_param[{index}]"].to(param.dtype))
    assert_all_same_bits(snapshot(optimizer), before)
    for each, tensors in ((optimizer, params), (other, others)):
        train(each, tensors, [3])
    assert_all_same_bits(snapshot(optimizer), snapshot(other))


def test_a_parameter_that_does_not_round_from_its_master_gets_its_value_back() -> None:
    optimizer, params = trained("bf16-master")
    with torch.no_grad():
        params[0].fill_(2.5)  # the master follows in the next step only
    optimizer.swap_ema_()
    optimizer.swap_ema_()
    assert_same_bits(params[0], torch.full_like(params[0], 2.5))


def test_the_values_return_after_an_error_in_the_block() -> None:
    optimizer, _ = trained()
    before = snapshot(optimizer)
    with pytest.raises(KeyError), optimizer.ema_weights():
        raise KeyError("evaluation")
    assert_all_same_bits(snapshot(optimizer), before)


def test_parameters_that_are_written_in_the_block_are_warned_of() -> None:
    optimizer, params = trained()
    before = params[0].detach().clone()
    best = torch.full_like(params[0], 3.0)
    message = r"FusedAdam\.swap_ema_: parameters were written while they held their averages"
    with pytest.warns(UserWarning, match=message), optimizer.ema_weights(), torch.no_grad():
        params[0].copy_(best)
    assert_same_bits(params[0], before)
    assert_same_bits(optimizer.state[params[0]]["ema_param"], best)
    with no_warning(), optimizer.ema_weights():
        assert_same_bits(params[0], best)
    # As an error, the warning comes when all is back.
    with (
        no_warning(),
        pytest.raises(UserWarning, match=message),
        optimizer.ema_weights(),
        torch.no_grad(),
    ):
        params[0].add_(0.0)
    assert_same_bits(params[0], before)
    train(optimizer, params, [3])


def test_parameters_without_an_average_keep_their_values() -> None:
    params = make_params()
    optimizer = FusedAdam(params, lr=0.1, ema_decay=DECAY)
    train(optimizer, params[:1], [0])
    before = [p.detach().clone() for p in params]
    with optimizer.ema_weights():
        assert not torch.equal(params[0], before[0])
        assert_bitwise_equal(params[1:], before[1:])


REFUSED: dict[str, Callable[[FusedOptimizer], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict({}),
    "ema_weights": lambda optimizer: optimizer.ema_weights().__enter__(),
    "__getstate__": copy.deepcopy,
    "remake_masters": lambda optimizer: optimizer.remake_masters(),
}


@pytest.mark.parametrize("action", REFUSED)
def test_what_needs_the_own_values_is_refused_while_averages_are_in_their_place(
    action: str,
) -> None:
    optimizer, _ = trained()
    before = snapshot(optimizer)
    optimizer.swap_ema_()
    swapped = snapshot(optimizer)
    message = (
        rf"FusedAdam\.{action}: expected the parameters to hold their own values, got their "
        r"averages\. Call FusedAdam\.swap_ema_\(\) first"
    )
    with pytest.raises(RuntimeError, match=message):
        REFUSED[action](optimizer)
    assert_all_same_bits(snapshot(optimizer), swapped)
    optimizer.swap_ema_()
    assert_all_same_bits(snapshot(optimizer), before)


@pytest.mark.parametrize("around", [lambda optimizer: optimizer, LARC])
def test_a_refused_step_does_not_call_its_closure(around: Any) -> None:
    optimizer = around(stepped(torch.nn.Parameter(torch.ones(2))))
    message = r"FusedSGD\.step: expected the"
    with optimizer.ema_weights(), pytest.raises(RuntimeError, match=message):
        optimizer.step(lambda: pytest.fail("called"))


def test_an_exchange_back_that_fails_is_continued() -> None:
    params = [torch.nn.Parameter(torch.arange(2.0)) for _ in range(3)]
    optimizer = stepped(*params)
    before = snapshot(optimizer)
    optimizer.swap_ema_()
    params[1].data = params[1].data.double()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"expected the parameter of shape \[2\] to"):
            optimizer.swap_ema_()
    params[1].data = params[1].data.float()
    optimizer.swap_ema_()
    assert_all_same_bits(snapshot(optimizer), before)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_parameters_of_one_memory_get_their_value_back(dtype: torch.dtype) -> None:
    a, b = (torch.nn.Parameter(torch.arange(3.0).to(dtype)) for _ in range(2))
    optimizer = stepped(a, b)
    b.data = a.data  # a step would refuse it
    before = snapshot(optimizer)
    with optimizer.ema_weights():
        pass
    assert_all_same_bits(snapshot(optimizer), before)


@pytest.mark.parametrize(("own", "other"), [(F32, F16), (BF16, F32)])
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


# --- Checkpoints ---------------------------------------------------------------------------------


def test_averages_of_a_16_bit_checkpoint_become_fp32() -> None:
    optimizer, params = trained()
    state_dict = optimizer.state_dict()
    half = state_dict["state"][0]["ema_param"].half()
    state_dict["state"][0] = {**state_dict["state"][0], "ema_param": half}
    optimizer.load_state_dict(state_dict)
    assert_same_bits(optimizer.state[params[0]]["ema_param"], half.float())


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
def test_a_checkpoint_without_averages_begins_those_of_a_program(kind: Any) -> None:
    saving = make_params(SHAPES)
    train(plain := kind(saving, lr=0.1), saving, [0])
    optimizer, params = made(OPTIM_SPECS[0], "fp32", ema_warmup=True)
    optimizer.load_state_dict(plain.state_dict())
    assert (optimizer.ema_decay, optimizer.ema_warmup) == (DECAY, True)
    before = params[0].detach().clone()
    train(optimizer, params, [1])
    # Warm-up goes by the step count, which is 2 now.
    expected = 3 / 12 * before + 9 / 12 * params[0].detach()
    torch.testing.assert_close(optimizer.state[params[0]]["ema_param"], expected)


def test_a_checkpoint_with_averages_goes_on_in_a_program_that_does_not_ask_for_them() -> None:
    optimizer, _ = trained()
    params = make_params(SHAPES)
    other = FusedAdam(params)
    other.load_state_dict(optimizer.state_dict())
    assert other.ema_decay == DECAY
    assert "ema_param" in other.state[params[0]]
