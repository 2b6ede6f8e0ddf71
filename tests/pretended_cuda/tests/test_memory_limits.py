# SPDX-License-Identifier: BSD-3-Clause
"""An allocation that fails inside of a step loses nothing: the step is taken later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from conftest import RUNTIME
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedLAMB

SEGMENT = 2 << 20  # what torch's allocator asks for, for small tensors
Make = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda params: FusedAdam(params, lr=0.1, max_grad_norm=1.0),
    "adam_masters": lambda params: FusedAdam(params, lr=0.1, master_weights=True),
    "lamb": lambda params: FusedLAMB(params, lr=0.1),
}


@pytest.fixture(autouse=True)
def _all_memory_afterwards() -> Iterator[None]:
    yield
    RUNTIME.pretended_cuda_set_memory(0)


def _params(device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(200_000, generator=generator)) for _ in range(3)]
    params = [torch.nn.Parameter(param.detach().to(device, dtype)) for param in params]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(device, dtype)
    return params


@contextlib.contextmanager
def _segments_left(count: int) -> Iterator[None]:
    """Torch's allocator has no free block, and gets so many new segments."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    RUNTIME.pretended_cuda_set_memory(total - free)
    occupied = []
    for size in (8 << 20, 2 << 20, 1 << 20, 64 << 10, 512):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                occupied.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    RUNTIME.pretended_cuda_set_memory(total - free + count * SEGMENT)
    yield
    RUNTIME.pretended_cuda_set_memory(0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_without_memory_is_taken_later(name: str) -> None:
    dtype = torch.bfloat16 if name == "adam_masters" else torch.float32
    expected = _params("cpu", dtype)
    OPTIMIZERS[name](expected).step()
    failures = 0
    for segments in range(12):
        params = _params("cuda", dtype)
        before = [param.detach().clone() for param in params]
        optimizer = OPTIMIZERS[name](params)
        with _segments_left(segments):
            try:
                optimizer.step()
            except torch.cuda.OutOfMemoryError:
                failures += 1
                assert all(torch.equal(x, y) for x, y in zip(before, params, strict=True))
                RUNTIME.pretended_cuda_set_memory(0)
                optimizer.step()
        # LAMB's norms are sums of 200,000 squares in fp64, in an order of the device's own.
        rtol, atol = (1e-6, 1e-7) if name == "lamb" else (0.0, 0.0)
        for param, reference in zip(params, expected, strict=True):
            torch.testing.assert_close(param.cpu(), reference, rtol=rtol, atol=atol)
        del params, before, optimizer
    assert 2 <= failures < 12


def test_a_scaler_without_memory_goes_on_later() -> None:
    scaler = GradScaler("cuda", init_scale=4.0)
    loss = torch.ones(1000, device="cuda").sum()
    with _segments_left(0), pytest.raises(torch.cuda.OutOfMemoryError):
        scaler.scale(loss)
    assert float(scaler.scale(loss)) == 4000.0
