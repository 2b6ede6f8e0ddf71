# SPDX-License-Identifier: BSD-3-Clause
"""What is built upon the layer's autograd: second derivatives, graphs, autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchfuse.parallel import SyncBatchNorm


@pytest.mark.parametrize("training", [False, True])
def test_derivatives_numerically(training: bool) -> None:
    layer = SyncBatchNorm(2, fuse_relu=training, dtype=torch.float64).train(training)
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    z = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, weight: Tensor, bias: Tensor, z: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x, z))

    assert torch.autograd.gradcheck(call, (x, weight, bias, z))
    assert torch.autograd.gradgradcheck(call, (x, weight, bias, z))


def test_gradients_with_a_graph_are_those_without() -> None:
    """Kernels compute them, or torch's operators, whose own gradients can be taken."""
    layer = SyncBatchNorm(2, fuse_relu=True, dtype=torch.float64)
    x, z, upstream = (torch.randn(3, 2, 4, dtype=torch.float64) for _ in range(3))
    sources = [x.requires_grad_(), z.requires_grad_(), *layer.parameters()]
    plain, with_graph = (
        torch.autograd.grad(layer(x, z), sources, upstream, create_graph=create_graph)
        for create_graph in (False, True)
    )
    torch.testing.assert_close(with_graph, plain)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        SyncBatchNorm(8, fuse_relu=True, momentum=None),
        nn.Conv2d(8, 8, 3, padding=1),
        SyncBatchNorm(8),
    )


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("backend", "dynamic", "memory"),
    [
        ("aot_eager", False, torch.channels_last),
        ("aot_eager", True, torch.contiguous_format),
        # Compilers; and where there is a device, inductor asks the driver about it.
        pytest.param(
            *("inductor", False, torch.contiguous_format),
            marks=[pytest.mark.processes, pytest.mark.gpu_only],
        ),
    ],
)
def test_compiles_into_one_graph(backend: str, dynamic: bool, memory: torch.memory_format) -> None:
    eager, other = (make_model().to(memory_format=memory) for _ in range(2))
    compiled = torch.compile(other, fullgraph=True, backend=backend, dynamic=dynamic)
    for size in (6, 6, 8) if backend == "aot_eager" else (6, 6):
        x = torch.randn(4, 3, size, size).to(memory_format=memory)
        torch.testing.assert_close(_step(compiled, x), _step(eager, x))
    torch.testing.assert_close([*other.buffers()], [*eager.buffers()])


def test_autocast() -> None:
    """As nn.BatchNorm: the dtype that comes in goes out, parameters and statistics stay in fp32."""

    def train(norm: Callable[[int], nn.Module]) -> tuple[Tensor, nn.Module]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 4, 3))
        x = torch.randn(4, 3, 8, 8)
        with torch.autocast("cpu", torch.bfloat16):
            inner = model[1](model[0](x))
            assert inner.dtype == torch.bfloat16
            y = model[2](inner)
        y.float().square().mean().backward()
        return y.detach().float(), model

    ours, model = train(SyncBatchNorm)
    theirs, reference = train(nn.BatchNorm2d)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, other.grad, rtol=5e-2, atol=5e-2)
    assert model[1].running_mean.dtype == torch.float32  # type: ignore[index, union-attr]


def test_inference_mode() -> None:
    layer, reference = SyncBatchNorm(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3, 5)
    with torch.inference_mode():
        trained = layer(x)
        evaluated = layer.eval()(x)
    torch.testing.assert_close(trained, reference(x))
    torch.testing.assert_close(evaluated, reference.eval()(x))
