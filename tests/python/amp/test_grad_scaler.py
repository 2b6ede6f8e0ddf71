# SPDX-License-Identifier: BSD-3-Clause
"""The same programs on torch.amp.GradScaler and on ours: same values, same errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.compare import assert_same_bits
from torch import Tensor

from torchfuse.amp import GradScaler

NON_FINITE = [math.inf, -math.inf, math.nan]

Program = Callable[[Any], Any]


def outcome(scaler: Any, program: Program) -> tuple[Any, ...]:
    """What a program returns, or which error it raises."""
    try:
        return ("value", program(scaler))
    except Exception as error:
        return ("error", type(error), str(error))


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert_same_bits(actual, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)
    else:
        assert actual == expected


def check(program: Program, **options: Any) -> tuple[Any, ...]:
    """Runs a program under both scalers; returns the common outcome."""
    torchs = outcome(torch.amp.GradScaler("cpu", **options), program)
    ours = outcome(GradScaler("cpu", **options), program)
    assert_same(ours, torchs)
    return ours


def sgd_with_grads(seed: int = 0, scale: float = 1.0) -> torch.optim.SGD:
    params = make_params()
    set_grads(params, random_grads(params, seed, scale))
    return torch.optim.SGD(params, lr=0.1)


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of parameters and gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad.clone() for p in params if p.grad is not None]
    return [p.detach().clone() for p in params] + grads


def test_is_a_torch_scaler_with_its_defaults() -> None:
    ours, torchs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    assert isinstance(ours, torch.amp.GradScaler)
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval"):
        assert getattr(ours, name)() == getattr(torchs, name)()
    assert ours.is_enabled()
    assert ours.state_dict() == torchs.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_scale_one_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(lambda s: s.scale(torch.full(shape, 1.5, dtype=dtype)), init_scale=128.0)


@pytest.mark.parametrize("container", [list, tuple])
def test_scale_many_tensors(container: type) -> None:
    outputs = container([torch.ones(2), container([torch.tensor(3.0), torch.ones(1).half()])])
    check(lambda s: s.scale(outputs), init_scale=512.0)


def test_scale_lazy_iterable() -> None:
    check(lambda s: list(s.scale(iter([torch.ones(2), torch.ones(3)]))))


@pytest.mark.parametrize("outputs", [1.0, None, [torch.ones(1), 2.0]], ids=str)
def test_scale_refuses_other_things(outputs: Any) -> None:
    assert check(lambda s: s.scale(outputs))[0] == "error"


def test_scale_carries_gradients() -> None:
    def program(scaler: Any) -> Tensor | None:
        weight = torch.ones(3, requires_grad=True)
        scaler.scale((2 * weight).sum()).backward()
        return weight.grad

    check(program)


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0, 1e-3, 2.0**120])
def test_unscale_divides_in_place(scale: float) -> None:
    def program(scaler: Any) -> list[Tensor]:
        scaler.scale(torch.zeros(()))
        optimizer = sgd_with_grads(scale=1e3)
        params = optimizer.param_groups[0]["params"]
        grads = [p.grad for p in params]
        scaler.unscale_(optimizer)
        assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))
        return values(optimizer)

    check(program, init_scale=scale)


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("tensor", [0, 1, 3])
@pytest.mark.parametrize("element", [0, -1])
def test_unscale_records_overflow(tensor: int, element: int, value: float) -> None:
    def program(scaler: Any) -> float:
        scaler.scale(torch.zeros(()))
        optimizer = sgd_with_grads()
        optimizer.param_groups[0]["params"][tensor].grad.view(-1)[element] = value
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        assert list(found) == [torch.device("cpu")]
        return float(found[torch.device("cpu")])

    assert check(program) == ("value", 1.0)


@pytest.mark.parametrize("sparse_dtype", [torch.float32, torch.float16])
def test_sparse_gradients(sparse_dtype: torch.dtype) -> None:
    def program(scaler: Any) -> Tensor:
        scaler.scale(torch.zeros(()))
        table = torch.nn.Parameter(torch.zeros(5, 2, dtype=sparse_dtype))
        indices, rows = torch.tensor([[3, 1, 3]]), torch.ones(3, 2, dtype=sparse_dtype)
        table.grad = torch.sparse_coo_tensor(indices, rows, (5, 2), check_invariants=True)
        scaler.unscale_(torch.optim.SGD([table], lr=0.1))
        return table.grad.to_dense()

    check(program, init_scale=4.0)


def test_fp16_gradients_are_refused() -> None:
    def program(scaler: Any) -> None:
        scaler.scale(torch.zeros(()))
        params = make_params(dtype=torch.float16)
        set_grads(params, random_grads(params, 0))
        scaler.unscale_(torch.optim.SGD(params, lr=0.1))

    expected = ("error", ValueError, "Attempting to unscale FP16 gradients.")
    assert check(program) == expected


def test_refused_gradients_leave_the_scaler_working() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    param.grad = torch.ones(2, dtype=torch.float16)
    optimizer = torch.optim.SGD([param], lr=0.1)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    param.data = param.data.float()
    param.grad = torch.full((2,), 8.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.detach(), torch.full((2,), -0.2))


def test_disabled_passes_everything_through() -> None:
    def program(scaler: Any) -> list[Any]:
        optimizer = sgd_with_grads()
        outputs = torch.ones(2)
        assert scaler.scale(outputs) is outputs
        scaler.unscale_(optimizer)
        loss = scaler.step(optimizer, closure=lambda: 5.0)
        scaler.update()
        scaler.load_state_dict({})
        settings = [scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()]
        return [loss, *settings, *values(optimizer)]

    assert check(program, enabled=False)[1][:4] == [5.0, 1.0, False, {}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_scaler_without_cuda_warns_and_is_disabled() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler("cuda")
    assert not scaler.is_enabled()


def test_foreign_private_attributes_stay_writable() -> None:
    """Libraries reach into these."""
    scaler = GradScaler("cpu")
    scaler._scale = torch.full((), 32.0)
    scaler._growth_tracker = torch.full((), 4, dtype=torch.int32)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 4)
    optimizer = sgd_with_grads()
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"][torch.device("cpu")].fill_(1.0)
    scaler.update()
    assert scaler.get_scale() == 16.0
    assert len(scaler._per_optimizer_states) == 0
    with pytest.raises(ValueError, match="expected _scale to be a tensor of 1 element of type"):
        scaler._scale = torch.ones(2)
    assert scaler.get_scale() == 16.0
