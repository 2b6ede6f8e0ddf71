# SPDX-License-Identifier: BSD-3-Clause
"""torch.ops.torchfuse.fused_adam_ as an operator, and what every optimizer's operator refuses.

Its values are in tests/python/optimizers/test_optim_spec_ops.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads
from support.compare import assert_same_bits
from torch import Tensor

from torchfuse.testing import assert_bitwise_equal

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
SHAPES = ((33, 5), (0,), (1,), (4097,))
LISTS = ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]


def make_arguments(device: str = "cpu") -> dict[str, list[Tensor]]:
    params = [p.detach() for p in make_params(SHAPES, device=device)]
    zeros = [torch.zeros_like(p) for p in params]
    return {
        "params": params,
        "grads": random_grads(params, 1),
        "exp_avgs": zeros,
        "exp_avg_sqs": [z.clone() for z in zeros],
        "max_exp_avg_sqs": [],
        "state_steps": [torch.zeros((), device=device) for _ in params],
        "master_params": [],
    }


def call(arguments: dict[str, list[Tensor]], **extra: Any) -> None:
    torch.ops.torchfuse.fused_adam_(*arguments.values(), **{**HYPER, **extra})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_grad_scale_and_found_inf(shape: tuple[int, ...], device: str) -> None:
    plain, scaled = make_arguments(device), make_arguments(device)
    scaled["grads"] = [g * 8 for g in scaled["grads"]]
    grads = [g.clone() for g in scaled["grads"]]
    scale = torch.full(shape, 8.0, device=device)
    call(plain)
    call(scaled, grad_scale=scale, found_inf=torch.zeros(shape, device=device))
    assert_bitwise_equal(scaled["params"], plain["params"])
    before = {name: [t.clone() for t in scaled[name]] for name in LISTS}
    for flag in (1.0, 2.0, math.nan):
        call(scaled, grad_scale=scale, found_inf=torch.full(shape, flag, device=device))
    for name, tensors in before.items():
        for index, t in enumerate(tensors):
            assert_same_bits(scaled[name][index], t, f"{name}[{index}]")
    assert_bitwise_equal(scaled["grads"], grads)


def test_empty_lists() -> None:
    torch.ops.torchfuse.fused_adam_([], [], [], [], [], [], [], **HYPER)


def test_leaf_that_requires_grad_is_refused_as_by_any_in_place_op() -> None:
    arguments = make_arguments()
    arguments["params"] = [p.requires_grad_() for p in arguments["params"]]
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        call(arguments)
    with torch.no_grad():
        call(arguments)


def _shorten(name: str) -> Callable[[dict[str, list[Tensor]]], None]:
    def spoil(arguments: dict[str, list[Tensor]]) -> None:
        arguments[name].pop()

    return spoil


def _replace(name: str, index: int, convert: Callable[[Tensor], Tensor]) -> Any:
    def spoil(arguments: dict[str, list[Tensor]]) -> None:
        arguments[name][index] = convert(arguments[name][index])

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_shorten("grads"), "expected grads to have as many tensors as params, 4, got 3"),
        (_shorten("exp_avgs"), "expected exp_avgs to have as many tensors as params, 4, got 3"),
        (_shorten("exp_avg_sqs"), "expected exp_avg_sqs to have as many tensors as params, 4"),
        (_shorten("state_steps"), "expected state_steps to have as many tensors as params, 4"),
        (
            lambda a: a.update(master_params=[torch.zeros(1)]),
            "expected master_params to have as many tensors as params, 4, got 1",
        ),
        (
            lambda a: a.update(max_exp_avg_sqs=[torch.zeros(1)]),
            "expected max_exp_avg_sqs to have as many tensors as params, 4, got 1",
        ),
        (
            lambda a: a.update(master_params=[p.clone() for p in a["params"]]),
            r"expected master_params\[0\] to belong to a float16 or bfloat16 parameter",
        ),
        (
            _replace("params", 2, lambda t: t.to(torch.int32)),
            r"expected params\[2\] to be of dtype float32, .*, got Int",
        ),
        (
            _replace("params", 0, lambda t: t[:1].expand(33, 5)),
            r"expected params\[0\] to fill its memory without gaps or overlap",
        ),
        (
            _replace("grads", 3, lambda t: t[1:]),
            r"expected grads\[3\] to have the sizes of params, \[4097\], got \[4096\]",
        ),
        (_replace("grads", 0, lambda t: t.to_sparse()), r"expected grads\[0\] to be dense, got"),
        (
            _replace("grads", 0, lambda t: t.to(torch.complex64)),
            r"expected grads\[0\] to be of dtype .*, got Complex.*view_as_real",
        ),
        (_replace("grads", 0, lambda t: t.to(torch.int64)), r"expected grads\[0\] to be of dtype"),
        (_replace("exp_avgs", 3, lambda t: t[1:]), r"expected exp_avgs\[3\] to have the sizes of"),
        (
            _replace("exp_avgs", 0, lambda t: t.t().contiguous().t()),
            r"expected exp_avgs\[0\] to have the strides of params",
        ),
        (_replace("exp_avg_sqs", 0, lambda t: t.double()), r"expected exp_avg_sqs\[0\] to be of"),
        (
            _replace("state_steps", 1, lambda t: t.double()),
            r"expected state_steps\[1\] to hold one element of dtype Float, got 1 of dtype Double",
        ),
        (
            _replace("state_steps", 1, lambda t: torch.zeros(2)),
            r"expected state_steps\[1\] to hold one element",
        ),
    ],
)
def test_bad_lists(spoil: Any, message: str) -> None:
    arguments = make_arguments()
    spoil(arguments)
    before = {name: [t.clone() for t in arguments[name]] for name in LISTS}
    with pytest.raises(RuntimeError, match=f"fused_adam_: {message}"):
        call(arguments)
    for name, tensors in before.items():
        for index, t in enumerate(tensors):
            after = arguments[name][index]
            assert torch.equal(after.to_dense(), t.to_dense()), f"{name}[{index}] was written"


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1.0), ("lr", math.nan), ("beta1", 1.0), ("beta2", -0.5), ("beta2", math.nan),
     ("eps", -1e-9), ("weight_decay", math.nan)],
)  # fmt: skip
def test_bad_hyper_parameters(name: str, value: float) -> None:
    arguments = make_arguments()
    with pytest.raises(RuntimeError, match=f"fused_adam_: expected {name} to be at least 0 and "):
        call(arguments, **{name: value})
    assert all(float(s) == 0.0 for s in arguments["state_steps"])


@pytest.mark.parametrize("name", ["grad_scale", "found_inf", "lr_tensor"])
@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros((), dtype=torch.int32)])
def test_bad_scalars(name: str, value: Tensor) -> None:
    expected = "hold one element"
    if name == "lr_tensor" and value.dtype == torch.int32:
        expected = "be of dtype Float or Double, got Int"
    with pytest.raises(RuntimeError, match=f"fused_adam_: expected {name} to {expected}"):
        call(make_arguments(), **{name: value})


@pytest.mark.parametrize("name", ["grads", "exp_avgs", "state_steps", "lr_tensor", "found_inf"])
def test_a_meta_tensor_among_others_is_refused(name: str) -> None:
    arguments = make_arguments()
    before = [p.clone() for p in arguments["params"]]
    extra = {}
    if name in arguments:
        arguments[name] = [t.to("meta") for t in arguments[name]]
    else:
        extra[name] = torch.zeros((), device="meta")
    message = (
        r"fused_adam_: expected params\[0\] to be on the meta device like the other arguments, "
        "got cpu"
    )
    with pytest.raises(RuntimeError, match=message):
        call(arguments, **extra)
    assert all(torch.equal(p, old) for p, old in zip(arguments["params"], before, strict=True))


def test_amsgrad_needs_its_state() -> None:
    with pytest.raises(RuntimeError, match="fused_adam_: expected max_exp_avg_sqs to"):
        call(make_arguments(), amsgrad=True)


def test_a_learning_rate_without_memory_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="fused_adam_: expected lr_tensor to "):
        call(make_arguments(), lr_tensor=torch.tensor(0.5).to_sparse())
