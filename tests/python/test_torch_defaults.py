# SPDX-License-Identifier: BSD-3-Clause
"""A program may set torch's default dtype and device: neither is for our counts and scalars."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits
from torch import Tensor

import torchfuse
from torchfuse.amp import GradScaler
from torchfuse.convert import to_apex_state_dict
from torchfuse.optimizers import (
    FusedNovoGrad,
    FusedOptimizer,
    FusedSGD,
)
from torchfuse.testing import OPTIM_SPECS, OptimSpec

#: bf16 rounds the first two counts, and fp16 has no number for the third.
COUNTS = (1001, 2**24 - 1, 70_000)

EVERY_OPTIMIZER = pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.algorithm)


@contextmanager
def torch_defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(
    params=[
        (torch.bfloat16, "cpu"),
        (torch.float16, "cpu"),
        (torch.float64, "cpu"),
        (torch.float32, "meta"),
    ],
    ids=str,
)
def under_defaults(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return functools.partial(torch_defaults, *request.param)


def stepped(make: Callable[..., FusedOptimizer]) -> FusedOptimizer:
    params = make_params()
    set_grads(params, random_grads(params, 1))
    optimizer = make(params)
    optimizer.step()
    return optimizer


def optimizer_of(spec: OptimSpec) -> FusedOptimizer:
    return stepped(lambda params: spec.optimizer(params, **spec.grid[-1]))


@EVERY_OPTIMIZER
@pytest.mark.parametrize("of_group", [False, True], ids=["param", "group"])
@pytest.mark.parametrize("count", COUNTS)
def test_counts_that_are_numbers_are_loaded(
    spec: OptimSpec, count: int, of_group: bool, under_defaults: Callable[[], Any]
) -> None:
    """Also of groups, where apex keeps them."""
    plain, other = optimizer_of(spec), optimizer_of(spec)
    saved = copy.deepcopy(plain.state_dict())
    for state in saved["state"].values():
        del state["step"]
    for holder in saved["param_groups"] if of_group else saved["state"].values():
        holder["step"] = count
    plain.load_state_dict(saved)
    plain.step()
    with under_defaults():
        other.load_state_dict(saved)
        counts = [state["step"].clone() for state in other.state.values()]
        other.step()
    assert [float(step) for step in counts] == [float(count)] * len(counts)
    assert_all_same_bits(snapshot(other), snapshot(plain))


def test_norms_of_novograd(under_defaults: Callable[[], Any]) -> None:
    """In apex's layout, also as plain lists."""
    plain, other = stepped(FusedNovoGrad), stepped(FusedNovoGrad)
    expected = to_apex_state_dict(plain)
    with under_defaults():
        exported = to_apex_state_dict(other)
    for a, b in zip(
        exported["param_groups"][0]["exp_avg_sq"],
        expected["param_groups"][0]["exp_avg_sq"],
        strict=True,
    ):
        assert (a.dtype, a.device.type) == (torch.float32, "cpu")
        assert torch.equal(a, b)
    group = exported["param_groups"][0]
    group["exp_avg_sq"] = [vector.tolist() for vector in group["exp_avg_sq"]]
    with under_defaults():
        other.load_state_dict(exported)
    assert_all_same_bits(snapshot(other), snapshot(plain))


def test_gradient_scaler(under_defaults: Callable[[], Any]) -> None:
    def run() -> dict[str, Tensor]:
        param = torch.nn.Parameter(torch.ones(4, dtype=torch.float32, device="cpu"))
        scaler = GradScaler("cpu", init_scale=2.0**17, hysteresis=2, history_size=3)
        for optimizer in (FusedSGD([param], lr=1.0), torch.optim.SGD([param], lr=1.0)):
            for _ in range(2):
                scaler.scale(param.sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scaler.load_state_dict(scaler.state_dict())
        scale, tracker = scaler._scale, scaler._growth_tracker
        return {"param": param.detach(), "scale": scale, "tracker": tracker}

    expected = run()
    with under_defaults():
        actual = run()
    assert_all_same_bits(actual, expected)


# Functions that make tensors, for which torch's defaults choose what a call leaves out.
FACTORIES = {"tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "empty", "full"}
FACTORIES |= {"arange", "linspace", "eye", "rand", "randn"}


def test_no_call_leaves_dtype_or_device_to_torchs_defaults() -> None:
    root = Path(torchfuse.__file__).parent
    files = sorted(root.rglob("*.py"))
    assert files
    careless = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    ]
    assert not careless
