# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam with `store_param_remainders`: fp32 masters as bf16 parameters and 16 bits more."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.adam import Config, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_same_bits
from torch import Tensor

import torchfuse
from torchfuse.optimizers import FusedAdam

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = ((257,), (33, 7), (1,), (0,), (4099,))
CONFIG = Config(lr=1e-3, weight_decay=0.1)
REMAINDERS: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}


def bits(tensor: Tensor) -> Tensor:
    """Unsigned, in int64."""
    raw = tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return raw.to(torch.int64) & (2 ** (8 * tensor.itemsize) - 1)


def masters_of(optimizer: FusedAdam, params: Sequence[Tensor]) -> list[Tensor]:
    """The masters by the definition: (param << 16) + remainder, modulo 2^32."""
    result = []
    for p in params:
        remainder = optimizer.state[p]["param_remainder"]
        assert remainder.dtype == torch.int16
        assert remainder.stride() == p.stride()
        total = ((bits(p) << 16) + remainder.to(torch.int64)) & 0xFFFFFFFF
        signed = torch.where(total >= 2**31, total - 2**32, total)
        result.append(signed.to(torch.int32).view(F32))
    return result


def rounded_away(master: Tensor) -> Tensor:
    """To the nearest bf16, ties away from zero; for finite values."""
    return ((bits(master) + 0x8000) >> 16).to(torch.int32).to(torch.int16).view(BF16)


@pytest.mark.parametrize("moments", [F32, BF16], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_masters_are_those_of_fp32_masters_bit_for_bit(
    amsgrad: bool, moments: torch.dtype, device: str
) -> None:
    config = Config(lr=1e-3, weight_decay=0.1, amsgrad=amsgrad)
    # Large enough for ties: one master in 2^17.
    params = make_params((*SHAPES, (131_073,)), BF16, device)
    twins = copy.deepcopy(params)
    whole = config.ours(params, master_weights=True, state_dtype=moments)
    halves = config.ours(twins, **REMAINDERS, state_dtype=moments)
    ties = 0
    for seed in range(10):
        grads = random_grads(params, seed)
        set_grads(params, grads)
        set_grads(twins, grads)
        whole.step()
        halves.step()
        for p, twin, restored in zip(params, twins, masters_of(halves, twins), strict=True):
            master = whole.state[p]["master_param"]
            assert_same_bits(restored, master, "master")
            assert_same_bits(twin, rounded_away(master).view(twin.shape), "param")
            for name in ("exp_avg", "exp_avg_sq"):
                assert_same_bits(halves.state[twin][name], whole.state[p][name], name)
            # Parameters differ where the master lies exactly between two of them, and nowhere else.
            differ = bits(p) != bits(twin)
            assert bool((bits(master)[differ] & 0xFFFF == 0x8000).all())
            ties += int(differ.sum())
    assert "master_param" not in halves.state[twins[0]]
    assert ties > 0, "the gradients were to produce ties"


def test_updates_that_bf16_loses_are_kept() -> None:
    param = torch.nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = FusedAdam([param], lr=1e-5, **REMAINDERS)
    for _ in range(400):
        param.grad = torch.ones(8, dtype=BF16)
        optimizer.step()
    master = masters_of(optimizer, [param])[0]
    torch.testing.assert_close(master, torch.full((8,), 1 - 400e-5), rtol=1e-5, atol=0)
    assert (param < 1).all()


def test_the_first_master_is_the_parameter() -> None:
    params = make_params(SHAPES, BF16)
    start = [p.detach().clone() for p in params]
    optimizer = FusedAdam(params, lr=0.0, **REMAINDERS)
    train(optimizer, params, [1])
    for p, before in zip(params, start, strict=True):
        assert_same_bits(p, before)
        assert int(optimizer.state[p]["param_remainder"].count_nonzero()) == 0


def test_fp32_parameters_beside_bf16_ones_are_stored_as_ever(device: str) -> None:
    params = [*make_params([(9,)], F32, device), *make_params([(9,)], BF16, device)]
    optimizer = FusedAdam(params, **REMAINDERS)
    train(optimizer, params, range(2))
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "param_remainder" in optimizer.state[params[1]]


def test_any_dense_layout(device: str) -> None:
    base = make_params([(12, 20)], BF16, device)[0].detach()
    flat, turned = torch.nn.Parameter(base.clone()), torch.nn.Parameter(base.clone().t())
    optimizers = [CONFIG.ours([p], **REMAINDERS) for p in (flat, turned)]
    for seed in range(3):
        grad = random_grads([flat], seed)[0]
        set_grads([flat, turned], [grad, grad.t()])
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(turned.t(), flat)
    remainders = [o.state[p]["param_remainder"] for o, p in zip(optimizers, (flat, turned))]  # noqa: B905
    assert_same_bits(remainders[1].t(), remainders[0])


def test_a_skipped_step_changes_nothing(device: str) -> None:
    params = make_params(SHAPES, BF16, device)
    optimizer = FusedAdam(params, skip_non_finite=True, **REMAINDERS)
    train(optimizer, params, [1])
    set_grads(params, random_grads(params, 2))
    assert params[0].grad is not None
    params[0].grad[3] = float("nan")
    before = snapshot(optimizer)
    optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)


def test_non_finite_values_are_those_of_fp32_masters(device: str) -> None:
    values = [float("inf"), -float("inf"), float("nan"), 1.0, 3.3e38, -0.0]
    start = torch.tensor(values, device=device).to(BF16)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    whole = FusedAdam(params[:1], lr=1e37, maximize=True, master_weights=True)
    halves = FusedAdam(params[1:], lr=1e37, maximize=True, **REMAINDERS)
    grad = torch.tensor([1.0, 1.0, 1.0, float("nan"), 1.0, 1.0], device=device).to(BF16)
    for _ in range(3):
        for p, optimizer in zip(params, (whole, halves), strict=True):
            p.grad = grad.clone()
            optimizer.step()
        master = whole.state[params[0]]["master_param"]
        restored = masters_of(halves, params[1:])[0]
        assert torch.equal(restored.isnan(), master.isnan())
        assert torch.equal(restored.nan_to_num(), master.nan_to_num())
        assert torch.equal(params[1].isnan(), params[0].isnan())
    # The fifth overflows in the second step; a moment with weight decay makes NaN of infinity.
    assert params[1].isnan().tolist() == [True, True, True, True, True, False]


# --- Refusals ------------------------------------------------------------------------------------


def test_remainders_need_masters() -> None:
    message = "FusedAdam: expected master_weights of group 0 to be True with store_param_remainders"
    with pytest.raises(ValueError, match=message):
        FusedAdam(make_params(dtype=BF16), store_param_remainders=True)


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_remainders_need_a_bf16_parameter(dtype: torch.dtype) -> None:
    message = (
        "FusedAdam: expected group 1 to hold a bf16 parameter with store_param_remainders, "
        f"got {dtype}. Set store_param_remainders=False in a group of its own"
    )
    groups = [{"params": make_params(dtype=BF16)}, {"params": make_params(dtype=dtype)}]
    with pytest.raises(ValueError, match=message):
        FusedAdam(groups, **REMAINDERS)


def test_remainders_do_not_extend_fp16() -> None:
    params = [*make_params([(2,)], BF16), *make_params([(2,)], F16)]
    message = r"FusedAdam: expected params\[1\] of group 0 to be bf16 with store_param_remainders"
    with pytest.raises(ValueError, match=message):
        FusedAdam(params, **REMAINDERS)


@pytest.mark.parametrize(
    ("dtype", "remainder", "message"),
    [
        (BF16, torch.int32, r"master_params\[0\] to be of dtype float32, or int16 for remainders"),
        (F16, torch.int16, r"master_params\[0\] to be of dtype float32, as only bfloat16"),
        (F32, torch.int16, r"master_params\[0\] to be of dtype float32, as only bfloat16"),
    ],
    ids=str,
)
def test_the_op_refuses_other_masters(
    dtype: torch.dtype, remainder: torch.dtype, message: str
) -> None:
    params = [p.detach() for p in make_params([(5,)], dtype)]
    states = [[torch.zeros(5)] for _ in range(2)]
    before = params[0].clone()
    hyper = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    masters = [torch.zeros(5, dtype=remainder)]
    with pytest.raises(RuntimeError, match=f"fused_adam_: expected {message}"):
        torchfuse.ops.fused_adam_(
            params,
            [torch.ones_like(p) for p in params],
            *states,
            [],
            [torch.zeros(())],
            masters,
            **hyper,
        )
    assert_same_bits(params[0], before)
