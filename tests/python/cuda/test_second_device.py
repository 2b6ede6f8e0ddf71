# SPDX-License-Identifier: BSD-3-Clause
"""Work goes to its tensors' device, whichever device is the current one.

The tensors lie on the second device, whose current stream is not its default one, while the first
device is current: a launch without a device guard is an error, memory that is taken there is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.batch_norm import make_problem
from support.compare import assert_all_same_bits
from torch import Tensor

from torchfuse import clip_grad_norm_
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.testing import OPTIM_SPECS, OptimSpec

pytestmark = pytest.mark.cuda
Body = Callable[[str], dict[str, Tensor]]


@contextmanager
def _first_is_current() -> Iterator[str]:
    """Yields the other device; where there is only one, no more than the stream is another."""
    other = f"cuda:{torch.cuda.device_count() - 1}"
    stream = torch.cuda.Stream(other)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.cuda.device(0):
        yield other
        assert torch.cuda.current_device() == 0


def _allocations() -> int:
    """How often memory of the first device was taken."""
    return int(torch.cuda.memory_stats(0)["allocation.all.allocated"])


def _same_on_the_second(body: Body) -> None:
    expected = {name: value.cpu() for name, value in body("cuda:0").items()}
    with _first_is_current() as other:
        taken = _allocations()
        values = {name: value.cpu() for name, value in body(other).items()}
        assert _allocations() == taken or other == "cuda:0"
    assert_all_same_bits(values, expected)


@pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.algorithm)
def test_every_optimizer(spec: OptimSpec) -> None:

    def body(device: str) -> dict[str, Tensor]:
        params = make_params(dtype=torch.bfloat16, device=device)
        optimizer = spec.optimizer(params, lr=0.01, master_weights=True, max_grad_norm=0.5)
        scaler = GradScaler(device, init_scale=8.0)
        for seed in range(3):
            scaler.scale(torch.ones((), device=device))
            set_grads(params, random_grads(params, seed, scale=8.0))
            if seed == 1:
                params[1].grad.view(-1)[2] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return snapshot(optimizer) | {"scale": torch.tensor(scaler.get_scale())}

    _same_on_the_second(body)


def _ops(device: str) -> dict[str, Tensor]:
    grads = random_grads(make_params(device=device), 0, scale=4.0)
    found_inf = torch.zeros((), device=device)
    torch.ops.torchfuse.multi_tensor_unscale_(grads, found_inf, torch.full((), 0.25, device=device))
    total, norms = torch.ops.torchfuse.multi_tensor_l2_norm(grads)
    params = make_params(device=device)
    set_grads(params, grads)
    clipped = clip_grad_norm_(params, 0.1)
    values = {f"grad[{index}]": param.grad for index, param in enumerate(params)}
    return {"total": total, "norms": norms, "clipped": clipped, "found_inf": found_inf, **values}


def _batch_norm_ops(device: str) -> dict[str, Tensor]:
    """Called from here: autograd's threads are on the tensors' device already."""
    ops = torch.ops.torchfuse
    problem = make_problem((5, 19, 7, 9), torch.float32).to(device)
    x, grad, weight, bias = problem.x, problem.grad, problem.weight, problem.bias
    mean, var = torch.zeros(19, device=device), torch.ones(19, device=device)
    packed = ops.batch_norm_stats(x)
    y, saved = ops.batch_norm_elemt(
        x, weight, bias, packed, mean, var, None, None, momentum=0.1, eps=1e-5, relu=False
    )
    sums = ops.batch_norm_backward_reduce(grad, x, saved, weight, bias, None, relu=False)[0]
    dx = ops.batch_norm_backward_elemt(grad, x, saved, sums, weight, bias, relu=False)
    return {"packed": packed, "y": y, "saved": saved, "sums": sums, "dx": dx}


@pytest.mark.parametrize("body", [_ops, _batch_norm_ops])
def test_ops_and_layers(body: Body) -> None:
    _same_on_the_second(body)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_one_optimizer_on_both_devices(max_grad_norm: float | None) -> None:
    """The norm is that of all gradients, and an overflow on either device skips both."""

    def body(*devices: str) -> dict[str, Tensor]:
        params = [param for device in devices for param in make_params(device=device)]
        optimizer = FusedAdam(params, lr=0.1, max_grad_norm=max_grad_norm)
        scaler = GradScaler(devices[0], init_scale=8.0)
        for seed in range(4):
            scaler.scale(torch.ones((), device=devices[0]))
            set_grads(params, random_grads(params, seed, scale=8.0))
            if seed in (1, 2):
                grad = params[0 if seed == 1 else -1].grad
                grad.view(-1)[2] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return snapshot(optimizer) | {"scale": torch.tensor(scaler.get_scale())}

    expected = {name: value.cpu() for name, value in body("cuda:0", "cuda:0").items()}
    with _first_is_current() as other:
        values = {name: value.cpu() for name, value in body("cuda:0", other).items()}
    assert set(values) == set(expected)
    for name, value in values.items():
        # With a norm of two parts the order of its sum is another.
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_a_capture_is_seen() -> None:
    """That of the tensors' device: the stream of the current one captures nothing."""
    with _first_is_current() as other:
        params = make_params(device=other)
        optimizer = FusedAdam(params, capturable=True)
        set_grads(params, random_grads(params, 0))
        before = [param.detach().clone() for param in params]
        torch.cuda.synchronize(other)
        stream = torch.cuda.Stream(other)  # type: ignore[no-untyped-call]
        with (
            pytest.raises(RuntimeError, match="the first step cannot be captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
            torch.cuda.device(0),
        ):
            optimizer.step()
        assert_all_same_bits(
            {str(i): param.detach().cpu() for i, param in enumerate(params)},
            {str(i): value.cpu() for i, value in enumerate(before)},
        )
