# SPDX-License-Identifier: BSD-3-Clause
"""torch on the pretended device: ATen's ops, copies, random numbers, allocator, graphs, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

Op = Callable[[Tensor, Tensor], Tensor]

OPS: dict[str, Op] = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b.t(),
    "cat": lambda a, b: torch.cat([a, b]),
    "strided": lambda a, b: a[:, 1::2] * b.t().t()[:, 1::2],
    "in_place": lambda a, b: a.clone().mul_(b),
    "in_place_view": lambda a, b: (c := a.clone(), c.t().add_(b.t()), c)[-1],
    "out": lambda a, b: torch.add(a, b, out=torch.empty(0, device=a.device)),
    "index": lambda a, b: a[torch.tensor([2, 0], device=a.device)],
    "mask": lambda a, b: a[a > 0],
    "assign": lambda a, b: (c := a.clone(), c.__setitem__(c > 0, 7.0), c)[-1],
    "nonzero": lambda a, b: torch.nonzero(a > 0),
    "topk": lambda a, b: a.topk(3).values,
    "unique": lambda a, b: a.round().unique(),
    "half": lambda a, b: (a.half() + 1).float(),
    "norm": lambda a, b: torch.linalg.vector_norm(a),
    "foreach": lambda a, b: torch.stack(torch._foreach_norm([a, b])),
    "scalar_tensor": lambda a, b: a * torch.tensor(3.0),
    "softmax": lambda a, b: torch.softmax(a, -1),
    "where": lambda a, b: torch.where(a > b, a, 0.0),
    "cumsum": lambda a, b: a.cumsum(0),
    "complex": lambda a, b: torch.complex(a, b).conj().resolve_conj().imag,
}


@pytest.mark.parametrize("name", OPS)
def test_ops_give_the_results_of_the_cpu(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 8, generator=generator) for _ in range(2))
    expected = OPS[name](a, b)
    result = OPS[name](a.cuda(), b.cuda())
    assert result.is_cuda
    assert result.dtype == expected.dtype
    assert torch.equal(result.cpu(), expected)


def test_sizes_are_those_of_each_call(seed: int) -> None:
    """Calls that differ in one thing, behind one whose results the device remembers."""
    x, square = torch.ones(4, 3, device="cuda"), torch.ones(4, 4, device="cuda")
    for _ in range(2):
        assert torch.arange(0.0, 1.0, 0.5, device="cuda").shape == (2,)
        assert torch.arange(0.0, 1.0, 0.25, device="cuda").shape == (4,)
        assert x.sum(0).shape == (3,)
        assert x.sum(1).shape == (4,)
        assert square.exp().stride() == (4, 1)
        assert square.t().exp().stride() == (1, 4)
        assert (x * 2.0).dtype == torch.float32
        assert (x * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float32
        assert (x.int() * 2.0).dtype == torch.float32
        assert torch.add(x, x, out=torch.empty(0, device="cuda")).shape == (4, 3)
        assert [y.shape for y in torch._foreach_mul([x, x.sum(1)], 2.0)] == [(4, 3), (4,)]
        assert torch.equal((y := x + 1).add_(y).cpu(), torch.full((4, 3), 4.0))
        assert torch.equal((x + 1).add_(x).cpu(), torch.full((4, 3), 3.0))
        with pytest.raises(RuntimeError, match="shape"):
            x.add_(torch.ones(2, 4, 3, device="cuda"))
    torch.set_default_dtype(torch.float64)
    assert (x.int() * 2.0).dtype == torch.float64


def test_lists_over_several_devices(seed: int) -> None:
    """Torch goes through them one by one, each tensor on its own device."""
    for _ in range(10):
        tensors = [torch.zeros((), device=device) for device in ("cuda:0", "cpu", "cuda:1")]
        for _ in range(3):
            torch._foreach_add_(tensors, 1)
        sums = torch._foreach_add(tensors, 1.0)
        assert [total.device for total in sums] == [tensor.device for tensor in tensors]
        assert float(tensors[2]) == 3.0
        assert [float(total) for total in sums] == [4.0, 4.0, 4.0]


def test_tensors_of_another_device_are_refused(seed: int) -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.zeros(3, device="cuda:1")
    for call in (
        lambda: torch.cat([here, there]),
        lambda: here + there,
        lambda: here[there.long()],
        lambda: torch.cat([here, there.cpu()]),
    ):
        with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
            call()


def test_numbers_are_of_the_tensors_type(seed: int) -> None:
    """To the bit: a number of Python's does not widen a tensor without dimensions."""
    generator = torch.Generator().manual_seed(0)
    for value in torch.randn(50, generator=generator):
        assert float(value.cuda() * 0.1) == float(value * 0.1)
    assert bool((torch.tensor(0.1).cuda() - 0.1) == 0.0)


def test_what_overlaps_is_refused(seed: int) -> None:
    x = torch.arange(6.0, device="cuda")
    for call in (lambda: x[1:].add_(x[:-1]), lambda: torch.add(x[:-1], 1.0, out=x[1:])):
        with pytest.raises(RuntimeError, match="single memory location"):
            call()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_outputs_get_the_results_sizes(seed: int) -> None:
    x = torch.ones(3, device="cuda")
    for size in (0, 1, 10):
        out = torch.full((size,), 7.0, device="cuda")
        assert torch.add(x, x, out=out).tolist() == [2.0, 2.0, 2.0]
        assert out.shape == (3,)


def test_evaluation_and_what_the_cpu_leaves_out(seed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 4, 4, generator=generator)
    layer = nn.BatchNorm2d(3).eval()
    expected = layer(images)
    assert torch.allclose(layer.cuda()(images.cuda()).cpu(), expected)
    bag = nn.EmbeddingBag(10, 3, mode="mean")
    words = torch.tensor([[1, 2], [3, 4]])
    expected = bag(words)
    assert torch.allclose(bag.cuda()(words.cuda()).cpu(), expected)


def test_numbers_are_checked_at_every_call(seed: int) -> None:
    x = torch.zeros(5, device="cuda")
    x.normal_(0.0, 1.0)
    with pytest.raises(RuntimeError, match="std >= 0"):
        x.normal_(0.0, -1.0)
    assert x.isfinite().all()


def _models() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    linear = nn.Sequential(nn.Linear(7, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    transformer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return {
        "linear": (linear, torch.randn(5, 7)),
        "convolution": (convolution, images),
        "transformer": (transformer, torch.randn(2, 3, 8)),
    }


@pytest.mark.parametrize("name", ["linear", "convolution", "transformer"])
def test_models_train_as_on_the_cpu(name: str, seed: int) -> None:
    model, inputs = _models()[name]
    twin = copy.deepcopy(model).cuda()
    optimizers = [torch.optim.AdamW(each.parameters(), foreach=False) for each in (model, twin)]
    for _ in range(2):
        for each, device, optimizer in zip((model, twin), ("cpu", "cuda"), optimizers, strict=True):
            optimizer.zero_grad()
            each(inputs.to(device)).pow(2).mean().backward()
            optimizer.step()
    for expected, param in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_autocast_chooses_types(seed: int) -> None:
    a = torch.randn(4, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert torch.softmax(a @ a, -1).dtype == torch.float32
