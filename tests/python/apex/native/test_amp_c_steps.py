# SPDX-License-Identifier: BSD-3-Clause
"""The steps of amp_C against the optimizers' formulas in fp64: order and meaning of arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.compare import assert_rounded, assert_same_bits
from support.native_calls import CALLS, one
from torch import Tensor

from torchfuse.apex.native import amp_c
from torchfuse.testing import formulas
from torchfuse.testing.reference import adam_update

BY_NAME = {call.name: call for call in CALLS}
MASTER = "multi_tensor_adam_capturable_master"
#: Names of the formulas' states, by those of lists.
STATES = {
    "exp_avgs": "exp_avg",
    "exp_avg_sqs": "exp_avg_sq",
    "momentum_buffers": "momentum_buffer",
    "sums": "sum",
}
# fp32 values, so that a tensor and a number agree.
LR, BETA1, BETA2, EPS, DECAY = 0.125, 0.875, 0.96875, 2.0**-10, 0.25
RATES = (BETA1, BETA2, EPS)
NORMS = torch.tensor([3.0, 0.5, 2.0, 0.0, 1.0])

Lists = list[list[Tensor]]


def make_flag(value: int = 0, device: str = "cpu") -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def make_lists(name: str, device: str = "cpu") -> Lists:
    lists = BY_NAME[name].make_lists(device=device)
    if name == MASTER:
        lists[1] = [master.bfloat16() for master in lists[4]]
    elif "lamb" in name:
        lists[1][3].zero_()  # a parameter without a norm
    return lists


def copies(lists: Lists) -> Lists:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def assert_same(lists: Lists, others: Lists) -> None:
    for tensors, expected in zip(lists, others, strict=True):
        for tensor, other in zip(tensors, expected, strict=True):
            assert_same_bits(tensor, other)


def call(name: str, lists: Lists, *arguments: Any, flag: int = 0) -> list[Any]:
    """What the arguments are then."""
    device = lists[0][0].device.type
    moved = [a.to(device, copy=True) if isinstance(a, Tensor) else a for a in arguments]
    getattr(amp_c, name)(65536, make_flag(flag, device), lists, *moved)
    return moved


RATE = "lr beta1 beta2 eps"
LAMB = (
    f"{RATE} step bias_correction weight_decay grad_averaging mode global_grad_norm max_grad_norm"
)
#: apex's order of the arguments behind the lists, and the formula.
ORDERS: dict[str, tuple[str, Any]] = {
    "multi_tensor_adam": (f"{RATE} step mode bias_correction weight_decay", adam_update),
    "multi_tensor_adam_capturable": (
        *(f"{RATE} step mode bias_correction weight_decay scale", adam_update),
    ),
    MASTER: (f"{RATE} step mode bias_correction weight_decay scale", adam_update),
    "multi_tensor_sgd": (
        "weight_decay momentum dampening lr nesterov first_run wd_after_momentum scale",
        formulas.sgd_update,
    ),
    "multi_tensor_adagrad": ("lr eps mode weight_decay", formulas.adagrad_update),
    "multi_tensor_novograd": (
        f"grad_norms {RATE} step bias_correction weight_decay grad_averaging moment_mode norm_type",
        formulas.novograd_update,
    ),
    "multi_tensor_lamb": (f"{LAMB} use_nvlamb", formulas.lamb_update),
}
#: Of the arguments, where a step below has no other; tensors and numbers mean the same.
VALUES: dict[str, Any] = {
    **{"lr": one(LR), "beta1": BETA1, "beta2": BETA2, "eps": EPS, "weight_decay": DECAY},
    **{"step": one(7, dtype=torch.int32), "mode": 1, "bias_correction": 1, "scale": one(0.25)},
    **{"momentum": 0.875, "dampening": 0.25, "nesterov": False, "first_run": False},
    **{"wd_after_momentum": False, "grad_norms": NORMS, "grad_averaging": 1, "moment_mode": 0},
    **{"norm_type": 2, "global_grad_norm": one(8.0), "max_grad_norm": one(2.0)},
    **{"use_nvlamb": None},
}


def options_of(values: dict[str, Any], update: Any) -> dict[str, Any]:
    """The formula's options of these arguments."""
    known = {
        **{name: value for name, value in values.items() if name not in ("lr", "step")},
        **{"lr": LR, "betas": (BETA1, BETA2), "lr_decay": 0.0, "initial_accumulator_value": 0.0},
        **{"adam_w_mode": values["mode"], "adagrad_w_mode": values["mode"], "init_zero": True},
        **{"reg_inside_moment": values["moment_mode"] == 0, "maximize": False},
    }
    names = inspect.signature(update).parameters
    return {name: value for name, value in known.items() if name in names}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("multi_tensor_adam", {"mode": 0}),
        ("multi_tensor_adam", {"bias_correction": 0}),
        ("multi_tensor_adam_capturable", {}),
        (MASTER, {}),
        ("multi_tensor_sgd", {"momentum": 0.0}),
        ("multi_tensor_sgd", {"wd_after_momentum": True}),
        ("multi_tensor_sgd", {"first_run": True}),
        ("multi_tensor_sgd", {"nesterov": True, "dampening": 0.0}),
        ("multi_tensor_adagrad", {"mode": 0}),
        ("multi_tensor_adagrad", {"mode": 1}),
        ("multi_tensor_novograd", {"bias_correction": 0}),
        ("multi_tensor_novograd", {"grad_averaging": 0, "moment_mode": 1, "norm_type": 0}),
        ("multi_tensor_lamb", {"mode": 0, "grad_averaging": 0}),
        # Only a norm above the limit clips.
        ("multi_tensor_lamb", {"weight_decay": 0.0, "bias_correction": 0, "max_grad_norm": 9.0}),
        ("multi_tensor_lamb", {"weight_decay": 0.0, "use_nvlamb": True}),
    ],
)
def test_a_step_is_that_of_the_formula(name: str, changes: dict[str, Any], device: str) -> None:
    values = VALUES | changes
    order, update = ORDERS[name]
    lists = make_lists(name, device)
    before = copies(lists)
    written = call(name, lists, *(values[argument] for argument in order.split()))
    factor = 0.25 if order.endswith("scale") else 1.0
    if "lamb" in name:
        factor *= min(1.0, float(values["max_grad_norm"]) / 8.0)
    without_state = "momentum" in order and (values["first_run"] or not values["momentum"])
    for index in range(len(NORMS)):
        kinds = zip(BY_NAME[name].lists, lists, before, strict=True)
        rows = {kind: (new[index], old[index].double()) for kind, new, old in kinds}
        grad, param = factor * rows["grads"][1], rows.get("masters", rows["params"])[1].clone()
        state = {STATES[kind]: rows[kind][1].clone() for kind in rows if kind in STATES}
        state = {} if without_state else state
        if "novograd" in name:
            state["exp_avg_norm"] = NORMS[index].to(device).double()
        update(param, grad, state, 7, **options_of(values, update))
        if "novograd" in name and grad.numel():
            assert_rounded(written[0][index], state["exp_avg_norm"], "norm")
        # apex's capturable steps unscale the gradients, others leave them.
        left = grad if "capturable" in name else rows["grads"][1]
        assert_rounded(rows["grads"][0], left, "grad", slack=0.0)
        assert_rounded(rows.get("masters", rows["params"])[0], param, "param", slack=4e-6)
        if name == MASTER:
            assert_same_bits(rows["params"][0], rows["masters"][0].bfloat16())
        for kind in rows.keys() & STATES.keys():
            exact = state.get(STATES[kind], rows[kind][1])
            assert_rounded(rows[kind][0], exact, kind, slack=4e-6)


@pytest.mark.parametrize("name", ORDERS)
def test_a_gradient_that_is_not_finite_propagates(name: str, device: str) -> None:
    lists = make_lists(name, device)
    lists[0][0][2] = float("inf")
    call(name, lists, *BY_NAME[name].arguments(5, device))
    assert not lists[1][0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_copies_in_another_dtype_are_written(dtype: torch.dtype, device: str) -> None:
    name = "multi_tensor_sgd"
    lists, without = make_lists(name, device), make_lists(name, device)
    lists[0] = [grad.to(dtype) for grad in lists[0]]
    without[0] = [grad.float() for grad in lists[0]]
    lists.append([torch.full_like(param, float("nan"), dtype=dtype) for param in lists[1]])
    arguments = BY_NAME[name].arguments(5, device)
    call(name, lists, *arguments)
    call(name, without, *arguments)
    assert_same([lists[-1]], [[param.to(dtype) for param in lists[1]]])
    torch.testing.assert_close(lists[1:-1], without[1:], rtol=2e-6, atol=1e-7)
    lists[-1] = [torch.zeros_like(copy) for copy in lists[-1]]
    kept = copies(lists)
    call(name, lists, *arguments, flag=1)
    assert_same(lists, kept)


def test_a_limit_of_zero_makes_gradients_zero(device: str) -> None:
    lists, without = (make_lists("multi_tensor_lamb", device) for _ in range(2))
    without[0] = [torch.zeros_like(grad) for grad in without[0]]
    for made, limit in ((lists, 0.0), (without, 1e9)):
        call("multi_tensor_lamb", made, LR, *RATES, 3, 1, DECAY, 1, 1, one(8.0), limit)
    assert_same([lists[1]], [without[1]])


# LAMB in two halves.

DECAYS = (DECAY, 0.0, 0.5, 0.125, 1.0)


def first_half(lists: Lists) -> None:
    """The step after 6 others; apex wants the norm on the CPU."""
    amp_c.multi_tensor_lamb_stage1_cuda(
        *(65536, make_flag(device=lists[0][0].device.type), lists),
        *(torch.tensor(DECAYS, device=lists[0][0].device), 6, *RATES, torch.tensor([8.0]), 2.0),
    )


def test_two_halves_are_the_step_of_the_formula(device: str) -> None:
    lists = make_lists("multi_tensor_lamb_stage1_cuda", device)
    before = copies(lists)
    first_half(lists)
    _, params, exp_avgs, exp_avg_sqs, updates = lists
    assert_same(lists[:2], before[:2])
    flag = make_flag(device=device)
    norms = [amp_c.multi_tensor_l2norm(65536, flag, [each], True)[1] for each in (params, updates)]
    amp_c.multi_tensor_lamb_stage2_cuda(65536, flag, [params, updates], *norms, LR, DECAY)
    options = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "use_nvlamb": True}
    for index, decay in enumerate(DECAYS):
        grad, param, first, second = (tensors[index].double() for tensors in before[:4])
        state = {"exp_avg": first, "exp_avg_sq": second}
        formulas.lamb_update(param, grad / 4, state, 7, weight_decay=decay, **options)
        assert_rounded(params[index], param, "param", slack=4e-6)
        assert_rounded(exp_avgs[index], first, "exp_avg", slack=2e-6)
        assert_rounded(exp_avg_sqs[index], second, "exp_avg_sq", slack=2e-6)


def test_lists_of_the_halves_may_differ_in_dtype(device: str) -> None:
    """Results are those of fp32, rounded."""
    dtypes = (torch.bfloat16, torch.float16, torch.float16, torch.bfloat16, torch.float32)
    lists = make_lists("multi_tensor_lamb_stage1_cuda", device)
    lists = [[t.to(dtype) for t in tensors] for tensors, dtype in zip(lists, dtypes, strict=True)]
    wide = [[tensor.float() for tensor in tensors] for tensors in lists]
    first_half(lists)
    first_half(wide)
    ones = torch.ones(5, device=device)
    for made in (lists, wide):
        call("multi_tensor_lamb_stage2_cuda", [made[1], made[4]], ones, ones, LR, DECAY)
    rounded = [[t.to(dtype) for t in tensors] for tensors, dtype in zip(wide, dtypes, strict=True)]
    assert_same(lists, rounded)


@pytest.mark.parametrize(
    ("decay", "nvlamb", "applies"),
    [(0.25, None, True), (0.0, None, False), (0.0, False, False), (0.0, True, True)],
)
def test_the_second_half_moves_by_the_ratio(
    decay: float, nvlamb: bool | None, applies: bool, device: str
) -> None:
    params, updates = make_lists("multi_tensor_lamb_stage2_cuda", device)
    norms = torch.tensor([2.0, 0.0, 1.0, 3.0, 0.5]), torch.tensor([4.0, 1.0, 1.0, 0.0, 4.0])
    ratios = [0.5, 1.0, 1.0, 1.0, 0.125] if applies else [1.0] * 5
    rows = zip(params, updates, ratios, strict=True)
    expected = [param - LR * ratio * update for param, update, ratio in rows]
    call("multi_tensor_lamb_stage2_cuda", [params, updates], *norms, LR, decay, nvlamb)
    torch.testing.assert_close(params, expected)
