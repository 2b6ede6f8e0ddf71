# SPDX-License-Identifier: BSD-3-Clause
"""What SyncBatchNorm takes as its input, and what it refuses, in one process."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.batch_norm import assert_close

from torchfuse.parallel import SyncBatchNorm


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, 2:8],
        lambda t: t[:, :, 1:4],
        lambda t: t.transpose(2, 3),
        lambda t: t[:, :, :, ::2],
        lambda t: t.transpose(0, 1),
        lambda t: t[:, :, :1].expand(-1, -1, 3, -1),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.filterwarnings("ignore:batch_norm_stats. the input of sizes")
@pytest.mark.filterwarnings("ignore:batch_norm_elemt. the input of sizes")
@pytest.mark.filterwarnings("ignore:batch_norm_backward")
def test_views(view: Any, channels_last: bool) -> None:
    memory = torch.channels_last if channels_last else torch.contiguous_format
    base = torch.randn(6, 10, 7, 8).to(memory_format=memory)
    grads = torch.randn(6, 10, 7, 8).to(memory_format=memory)
    x, grad = view(base).detach().requires_grad_(), view(grads)
    reference = x.detach().double().requires_grad_()
    layer = SyncBatchNorm(x.size(1))
    layer(x).backward(grad)
    torch.nn.functional.batch_norm(reference, None, None, training=True).backward(grad.double())
    assert_close(x.grad, reference.grad, 1e-5)


def test_slices_are_read_where_they_lie() -> None:
    """Neither slices nor gradients of another stride are copied."""
    ops = torch.ops.torchfuse
    scale = torch.ones(8)
    for memory in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 16, 6, 6).to(memory_format=memory)[:, 4:12]
        z = torch.randn(4, 9, 6, 6).to(memory_format=memory)[:, :8]
        grad = torch.randn(4, 8, 6, 6).to(memory_format=memory)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            packed = ops.batch_norm_stats(x)
            rule = {"momentum": 0.1, "eps": 1e-5, "relu": True}
            y, saved = ops.batch_norm_elemt(x, scale, scale, packed, None, None, None, z, **rule)
            sums, _, _, behind = ops.batch_norm_backward_reduce(
                grad, x, saved, scale, scale, y, relu=True
            )
            ops.batch_norm_backward_elemt(behind, x, saved, sums, scale, scale)
        names = {event.key for event in profile.key_averages()}
        assert "torchfuse::batch_norm_backward_elemt" in names
        assert not names & {"aten::contiguous", "aten::copy_", "aten::clone"}, names


def test_an_input_that_must_be_copied_is_told() -> None:
    # Torch warns once for each process.
    code = (
        "import torch; from torchfuse.parallel import SyncBatchNorm\n"
        "x = torch.randn(4, 3, 8, 8)[:, :, :, ::2]\n"
        "layer = SyncBatchNorm(3); layer(x); layer(x); layer(x.contiguous())\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert done.stderr.count("is copied in every call") == 1, done.stderr
    assert "sizes [4, 3, 8, 4] and strides [192, 64, 8, 2]" in done.stderr


def test_nan_and_infinity_stay_in_their_channel() -> None:
    x = torch.randn(4, 3, 5, 5)
    x[0, 1, 2, 2] = torch.nan
    x[1, 2, 0, 0] = torch.inf
    y = SyncBatchNorm(3, fuse_relu=True)(x)
    assert torch.isfinite(y[:, 0]).all()
    assert torch.isnan(y[:, 1]).all()
    assert torch.isnan(y[:, 2]).any()


def test_an_empty_batch() -> None:
    layer = SyncBatchNorm(3)
    state = copy.deepcopy(layer.state_dict())
    x = torch.empty(0, 3, 4, 4, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    for name, value in state.items():
        assert torch.equal(layer.state_dict()[name], value), name
    assert torch.equal(layer.weight.grad, torch.zeros(3))


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "one dimension": (
        lambda layer: layer(torch.randn(3)),
        ValueError,
        r"expected at least 2D input \(got 1D input\)",
    ),
    "channels": (
        lambda layer: layer(torch.randn(2, 4, 5, 5)),
        ValueError,
        r"expected input to have num_features = 3 channels in dimension 1, got 4",
    ),
    "integers": (
        lambda layer: layer(torch.ones(2, 3, 4, dtype=torch.int64)),
        RuntimeError,
        r"expected input to be of dtype float32, float16, bfloat16 or float64, got Long",
    ),
    "one value": (
        lambda layer: layer(torch.randn(1, 3, 1, 1)),
        ValueError,
        r"expected more than 1 value per channel when training, got input size",
    ),
    "residual's sizes": (
        lambda layer: layer(torch.randn(2, 3, 4), torch.randn(2, 3, 5)),
        RuntimeError,
        r"expected residual to have the sizes of input, \[2, 3, 4\], got \[2, 3, 5\]",
    ),
    "residual's dtype": (
        lambda layer: layer(torch.randn(2, 3, 4), torch.randn(2, 3, 4).half()),
        RuntimeError,
        r"expected residual to be of the dtype of input, Float, got Half",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_changes_nothing(name: str) -> None:
    call, error, message = BAD[name]
    layer = SyncBatchNorm(3)
    state = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=rf"SyncBatchNorm\(3\): {message}"):
        call(layer)
    for name, value in state.items():
        assert torch.equal(layer.state_dict()[name], value), name
    layer(torch.randn(2, 3, 4))


def test_layers_that_do_not_fit_the_input() -> None:
    with pytest.raises(ValueError, match="channels in the last dimension, got 4"):
        SyncBatchNorm(3, channel_last=True)(torch.randn(2, 3, 4))
    message = "expected weight to be on the device of input, cpu, got meta. Move"
    with pytest.raises(RuntimeError, match=rf"SyncBatchNorm\(3\): {message}"):
        SyncBatchNorm(3, device="meta")(torch.randn(2, 3, 4))
