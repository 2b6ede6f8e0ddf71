# SPDX-License-Identifier: BSD-3-Clause
"""Bad input to FusedAdam: the message names what is wrong, nothing changes, and it works on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import Config, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits

from torchfuse.optimizers import FusedAdam

CONFIG = Config(weight_decay=0.1)


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_hyper_parameters_out_of_range(name: str, value: float) -> None:
    message = rf"FusedAdam: expected {name} of group 0 to be at least 0"
    with pytest.raises(ValueError, match=message):
        FusedAdam(make_params(), **{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 1])
def test_betas_out_of_range(index: int, value: float) -> None:
    betas = [0.9, 0.99]
    betas[index] = value
    message = rf"expected betas\[{index}\] of group 0 to be at least 0 and less than 1, got"
    with pytest.raises(ValueError, match=message):
        FusedAdam(make_params(), betas=tuple(betas))


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), None])
def test_betas_of_the_wrong_form(betas: Any) -> None:
    with pytest.raises(ValueError, match="expected betas of group 0 to be a pair of numbers"):
        FusedAdam(make_params(), betas=betas)


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_hyper_parameters_of_the_wrong_type(name: str) -> None:
    with pytest.raises(TypeError, match=rf"expected {name} of group 0 to be a number"):
        FusedAdam(make_params(), **{name: "0.1"})


@pytest.mark.parametrize(
    "lr", [torch.tensor([1e-3, 1e-3]), torch.tensor(1), torch.tensor(1e-3, dtype=torch.complex64)]
)
def test_tensor_lr_of_the_wrong_form(lr: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected lr of group 0 to be a number or a 1-element"):
        FusedAdam(make_params(), lr=lr)


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_max_grad_norm_out_of_range(value: float) -> None:
    message = "expected max_grad_norm of group 0 to be None or at least 0"
    with pytest.raises(ValueError, match=message):
        FusedAdam(make_params(), max_grad_norm=value)


@pytest.mark.parametrize(
    ("param", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.complex64), ValueError, r"params\[1\] of group 0 to be fp32"),
        (torch.zeros(3).to_sparse(), ValueError, r"params\[1\] of group 0 to be dense"),
        (torch.zeros(3, dtype=torch.float8_e5m2), ValueError, r"params\[1\] of group 0 to be fp32"),
    ],
    ids=["complex", "sparse", "float8"],
)
def test_parameters_that_cannot_be_updated(
    param: torch.Tensor, error: type[Exception], message: str
) -> None:
    good = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(error, match=message):
        FusedAdam([good, torch.nn.Parameter(param)])


def test_a_parameter_listed_twice() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match="group 0 to be listed once"),
    ):
        FusedAdam([param, param])
    with pytest.raises(ValueError, match="more than one parameter group"):
        FusedAdam([{"params": [param]}, {"params": [param]}])


def test_no_parameters_as_torch() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdam([])
    with pytest.raises(TypeError, match="should be an iterable"):
        FusedAdam(torch.zeros(3))


@pytest.mark.parametrize(
    "extra",
    [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": math.nan}, {"max_grad_norm": 7.0}],
    ids=["lr", "betas", "eps", "max_grad_norm"],
)
def test_bad_group_added_later_is_not_kept(extra: dict[str, Any]) -> None:
    params = make_params()
    optimizer = CONFIG.ours(params)
    train(optimizer, params, [0])
    with pytest.raises(ValueError, match=rf"{next(iter(extra))}.* of group 1"):
        optimizer.add_param_group({"params": make_params([(3,)]), **extra})
    assert len(optimizer.param_groups) == 1
    train(optimizer, params, [1])
    assert float(optimizer.state[params[0]]["step"]) == 2.0


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("lr", -1.0, "lr"),
        ("lr", math.nan, "lr"),
        ("betas", (1.0, 0.9), r"betas\[0\]"),
        ("betas", (0.9, -0.1), r"betas\[1\]"),
        ("eps", -1e-8, "eps"),
        ("weight_decay", math.nan, "weight_decay"),
    ],
)
def test_hyper_parameters_edited_to_bad_values(key: str, value: Any, name: str) -> None:
    params = make_params()
    optimizer = CONFIG.ours(params)
    train(optimizer, params, [0])
    before, good = snapshot(optimizer), optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = value
    with pytest.raises((RuntimeError, ValueError), match=rf"expected {name} of group 0"):
        optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.param_groups[0][key] = good
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 2.0


#: The parameter that the tests below spoil.
PLACE = r"params\[1\] of group 0"


def check_refused_step(spoil: Callable[[FusedAdam, list[Any]], None], message: str) -> None:
    """`spoil` breaks something after two steps; the step is refused and changes nothing."""
    params = make_params()
    optimizer = CONFIG.ours(params)
    train(optimizer, params, range(2))
    set_grads(params, random_grads(params, 2))
    saved = [dict(optimizer.state[p]) for p in params]
    before = snapshot(optimizer)
    spoil(optimizer, params)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        optimizer.step()
    for p, state in zip(params, saved, strict=True):
        optimizer.state[p] = state
        p.grad = None
        p.grad_dtype = p.dtype
    set_grads(params, random_grads(params, 2))
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [3.0] * len(params)


def replace_state(name: str, convert: Callable[[torch.Tensor], Any]) -> Any:
    def spoil(optimizer: FusedAdam, params: list[Any]) -> None:
        state = optimizer.state[params[1]]
        state[name] = convert(state[name])

    return spoil


def replace_grad(convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def spoil(optimizer: FusedAdam, params: list[Any]) -> None:
        params[1].grad_dtype = None
        params[1].grad = convert(params[1].grad)

    return spoil


def set_attribute(name: str, value: Any) -> Any:
    def spoil(optimizer: FusedAdam, params: list[Any]) -> None:
        setattr(optimizer, name, value)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            replace_grad(lambda g: g.to_sparse()),
            rf"expected grad of {PLACE} to be dense, got .*Spa",
        ),
        (replace_grad(lambda g: g.to(torch.complex64)), rf"expected grad of {PLACE} to be of"),
        (replace_state("exp_avg", lambda s: s[:1]), rf"exp_avg of {PLACE} to have the sizes"),
        (replace_state("exp_avg_sq", lambda s: s.double()), rf"exp_avg_sq of {PLACE} to be of"),
        (replace_state("exp_avg_sq", lambda s: s.to(torch.int32)), rf"exp_avg_sq of {PLACE} to be"),
        (replace_state("exp_avg", lambda s: s.to("meta")), rf"exp_avg of {PLACE} to be on"),
        (replace_state("exp_avg", lambda s: "text"), rf"exp_avg of {PLACE} to be a tensor"),
        (replace_state("step", lambda s: torch.zeros(2)), rf"step of {PLACE} to hold one element"),
        (replace_state("step", lambda s: 5), rf"step of {PLACE} to be a tensor, got int"),
        (replace_state("step", lambda s: s.to("meta")), rf"step of {PLACE} to hold one element"),
        (replace_state("step", torch._neg_view), rf"step of {PLACE} to hold its own values"),
        (set_attribute("found_inf", torch.zeros(2)), "expected found_inf to hold one element"),
        (set_attribute("found_inf", torch.zeros(()).double()), "expected found_inf to hold one"),
        (set_attribute("grad_scale", torch.ones(3)), "expected grad_scale to hold one element"),
    ],
)
def test_tensors_that_do_not_fit(spoil: Any, message: str) -> None:
    check_refused_step(spoil, message)


def test_fp64_parameter_with_fp32_state_is_refused_by_name() -> None:
    params = make_params([(4,), (5,)])
    optimizer = CONFIG.ours(params)
    train(optimizer, params, [0])
    params[1].grad = None
    params[1].data = params[1].data.double()
    params[1].grad = torch.ones(5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=rf"expected exp_avg of {PLACE} to be of"):
        optimizer.step()


def test_gradient_without_memory() -> None:
    """As FSDP leaves freed shards: sizes and strides look normal, the pointer is null."""
    params = make_params()
    optimizer = CONFIG.ours(params)
    train(optimizer, params, [0])
    before = snapshot(optimizer)
    params[2].grad.untyped_storage().resize_(0)
    with pytest.raises(
        RuntimeError, match=r"expected grad of params\[2\] of group 0 to lie within"
    ):
        optimizer.step()
    params[2].grad = before["grad[2]"].clone()
    assert_all_same_bits(snapshot(optimizer), before)


def test_groups_with_different_clipping() -> None:
    params = make_params()
    groups = [{"params": params[:2], "max_grad_norm": 1.0}, {"params": params[2:]}]
    message = "expected max_grad_norm of group 1 to be 1.0 as in group 0, got 2.0"
    with pytest.raises(ValueError, match=message):
        FusedAdam([groups[0], {**groups[1], "max_grad_norm": 2.0}])
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}], max_grad_norm=1.0)
    optimizer.param_groups[1]["max_grad_norm"] = 2.0
    with pytest.raises(ValueError, match=message):
        train(optimizer, params, [0])


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms", "grad_scaler"])
def test_arguments_that_apex_removed(name: str) -> None:
    optimizer = FusedAdam(make_params())
    with pytest.raises(RuntimeError, match=f"expected {name} to be None"):
        optimizer.step(**{name: object()})
    optimizer.step(None, **{name: None})


def test_unknown_step_argument() -> None:
    with pytest.raises(TypeError, match="expected no argument 'loss'"):
        FusedAdam(make_params()).step(loss=1)


def test_closure_under_a_scaler() -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        optimizer.step(lambda: 1.0)


def test_wrapper_tensors_are_refused_by_name() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    wrapped = torch.nn.Parameter(TwoTensor(torch.zeros(2), torch.zeros(2)))
    with pytest.raises(TypeError, match=r"params\[0\] of group 0 to be a plain tensor"):
        FusedAdam([wrapped])
