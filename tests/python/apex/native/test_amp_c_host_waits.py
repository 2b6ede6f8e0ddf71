# SPDX-License-Identifier: BSD-3-Clause
"""The functions of amp_C make the host wait for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.compare import assert_same_bits
from support.native_calls import CALLS, NativeCall, one

from torchfuse.apex.native import amp_c
from torchfuse.optimizers import FusedAdam

pytestmark = pytest.mark.cuda


@contextmanager
def no_host_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_guard_sees_a_wait() -> None:
    value = torch.ones((), device="cuda")
    with no_host_wait(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        value.item()


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_waits_for_nothing(call: NativeCall, dtype: torch.dtype) -> None:
    lists, others = (call.make_lists(dtype=dtype, device="cuda") for _ in range(2))
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    arguments = call.arguments(len(lists[0]), torch.device("cuda"))
    with no_host_wait():
        call.function(65536, flag, lists, *arguments)
    call(flag, others)
    for tensors, same in zip(lists, others, strict=True):
        for tensor, other in zip(tensors, same, strict=True):
            assert_same_bits(tensor, other)


def test_an_update_of_the_scale_waits_for_nothing() -> None:
    tensors = [one(8.0, "cuda"), *(one(1, "cuda", torch.int32) for _ in range(2)), one(1, "cuda")]
    with no_host_wait():
        amp_c.update_scale_hysteresis(*tensors, 2.0, 0.5, 10, 1)
    assert tensors[0].item() == 4.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_step_converts_its_numbers_without_a_wait(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    params = make_params(device="cuda")
    rate = torch.full(shape, 0.125, dtype=dtype, device="cuda")
    optimizer = FusedAdam(params, lr=rate, betas=(rate, rate))
    set_grads(params, random_grads(params, 1))
    with no_host_wait():
        optimizer.step()
