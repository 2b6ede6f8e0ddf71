# SPDX-License-Identifier: BSD-3-Clause
"""Groups that a program edits between steps: what is refused leaves masters and states alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_same_bits

from torchfuse.optimizers import FusedAdam, FusedSGD

F16, BF16 = torch.float16, torch.bfloat16


def trained(dtype: torch.dtype, **options: Any) -> tuple[torch.nn.Parameter, FusedAdam]:
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = FusedAdam([param], lr=1e-4, **options)
    for _ in range(3):
        param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_masters_survive_stochastic_rounding_that_is_refused(dtype: torch.dtype) -> None:
    param, optimizer = trained(dtype, master_weights=True)
    master = optimizer.state[param]["master_param"].clone()
    optimizer.param_groups[0]["stochastic_rounding"] = True
    with pytest.raises(ValueError, match=r"expected master_weights of group 0 to be False with"):
        optimizer.step()
    assert_same_bits(optimizer.state[param]["master_param"], master, "master")
    optimizer.param_groups[0]["stochastic_rounding"] = False
    optimizer.step()


def test_a_flag_that_is_none_is_refused_before_masters_are_dropped() -> None:
    param, optimizer = trained(BF16, master_weights=True)
    optimizer.param_groups[0]["stochastic_rounding"] = "no"
    with pytest.raises(TypeError, match=r"expected stochastic_rounding of group 0 to be a bool"):
        optimizer.step()
    assert "master_param" in optimizer.state[param]


def test_a_wrong_dtype_makes_no_state() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param])
    param.grad = torch.ones(3)
    for dtype in (torch.int32, torch.float64, torch.complex64):
        optimizer.param_groups[0]["state_dtype"] = dtype
        with pytest.raises(ValueError, match=r"expected state_dtype of group 0 to be None, torch"):
            optimizer.step()
        assert not optimizer.state[param]
    optimizer.param_groups[0]["state_dtype"] = None
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_hook_that_fails_leaves_no_scale_behind(failure: type[BaseException]) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedSGD([param], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def fail(*_: Any) -> None:
        raise failure

    handle = optimizer.register_step_pre_hook(fail)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((2,), 0.5)
    with pytest.raises(failure):
        scaler.step(optimizer)
    handle.remove()
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((2,), 0.5))


@pytest.mark.parametrize(
    "values",
    [{"lr": 10**400}, {"eps": 10**400}, {"betas": (0.9, 10**400)}, {"max_grad_norm": 10**400}],
    ids=lambda values: next(iter(values)),
)
def test_a_number_that_no_float_holds_is_named_and_adds_no_group(values: dict[str, Any]) -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = FusedAdam([first])
    key = next(iter(values))
    with pytest.raises(
        ValueError, match=rf"expected {key}\S* of group 1 to be a number that a float can hold"
    ):
        optimizer.add_param_group({"params": [second], **values})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second]})


def test_a_norm_of_nan_is_refused_by_its_range() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    param.grad = torch.ones(2)
    optimizer.param_groups[0]["max_grad_norm"] = float("nan")
    with pytest.raises(ValueError, match=r"expected max_grad_norm of group 0 to be None or at lea"):
        optimizer.step()
