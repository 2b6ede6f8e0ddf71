# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm in one process: the numbers of nn.BatchNorm, for every layout, dtype and fusion."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.batch_norm import (
    TOLERANCE,
    Pass,
    Problem,
    assert_close,
    assert_passes_close,
    make_problem,
)

from torchfuse import _C
from torchfuse.parallel import SyncBatchNorm

DTYPES = list(TOLERANCE)
SHAPES = [
    (4, 3, 5, 7),
    (2, 65, 9, 9),
    (8, 17, 1, 1),
    (3, 1, 40, 33),
    (5, 257, 4, 4),
    (33, 300),
    (4, 8, 50),
    (2, 6, 3, 4, 5),
    (1, 5, 97, 101),
]


def layer_for(problem: Problem, device: str = "cpu", **options: Any) -> SyncBatchNorm:
    affine = problem.weight is not None
    layer = SyncBatchNorm(
        problem.x.size(1),
        eps=problem.eps,
        momentum=problem.momentum,
        affine=affine,
        fuse_relu=problem.relu,
        device=device,
        dtype=problem.weight.dtype if problem.weight is not None else torch.float32,
        **options,
    )
    if problem.weight is not None and problem.bias is not None:
        with torch.no_grad():
            layer.weight.copy_(problem.weight)
            layer.bias.copy_(problem.bias)
    return layer


def run(layer: SyncBatchNorm, problem: Problem, device: str = "cpu") -> Pass:
    def place(tensor: torch.Tensor | None) -> torch.Tensor | None:
        # Not `to`, which would make strides of its own.
        return None if tensor is None else tensor.detach().to(device).requires_grad_()

    x, z = place(problem.x), place(problem.residual)
    assert x is not None
    output = layer(x, z)
    output.backward(problem.grad.to(device))
    assert output.dtype == problem.x.dtype
    assert output.stride() == x.stride()
    return Pass(
        output.detach(),
        x.grad,  # type: ignore[arg-type]
        layer.weight.grad if layer.affine else None,
        layer.bias.grad if layer.affine else None,
        None if z is None else z.grad,
        layer.running_mean,
        layer.running_var,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_batch_norm(
    shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype, device: str
) -> None:
    for residual in (False, True):
        for relu in (False, True):
            problem = make_problem(
                shape, dtype, channels_last=channels_last, residual=residual, relu=relu
            )
            actual = run(layer_for(problem, device), problem, device)
            assert_passes_close(actual, problem.reference(), dtype)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_instruction_level_gives_the_same_bits(isa: str, channels_last: bool) -> None:
    best = _C.cpu_isa()
    if ["baseline", "avx2", "avx512"].index(isa) > ["baseline", "avx2", "avx512"].index(best):
        pytest.skip(f"this processor has no {isa}")
    for dtype in DTYPES:
        problem = make_problem(
            (3, 37, 11, 13), dtype, channels_last=channels_last, residual=True, relu=True
        )
        _C.set_cpu_isa(best)
        expected = run(layer_for(problem), problem)
        _C.set_cpu_isa(isa)
        actual = run(layer_for(problem), problem)
        for name, value in vars(expected).items():
            assert torch.equal(getattr(actual, name), value), name


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_number_of_threads_does_not_matter(channels_last: bool) -> None:
    problem = make_problem((16, 40, 28, 28), channels_last=channels_last, relu=True)
    passes = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        passes.append(run(layer_for(problem), problem))
    for other in passes[1:]:
        for name, value in vars(passes[0]).items():
            assert value is None or torch.equal(getattr(other, name), value), name


@pytest.mark.parametrize("channels_last", [False, True])
def test_every_channel_count(channels_last: bool) -> None:
    for channels in [*range(1, 70), 127, 128, 129, 255, 256, 257, 513, 1000, 2048]:
        problem = make_problem((3, channels, 2, 3), channels_last=channels_last, relu=True)
        assert_passes_close(run(layer_for(problem), problem), problem.reference(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mean", [1e4, -1e4])
def test_a_mean_of_ten_thousand_sigma(mean: float, channels_last: bool, dtype: torch.dtype) -> None:
    """The spacing of fp32 numbers there is 1e-3: a mean in fp32 would be off by that much."""
    problem = make_problem((8, 5, 16, 16), dtype, channels_last=channels_last, mean=mean)
    assert_passes_close(run(layer_for(problem), problem), problem.reference(), dtype)


def test_a_tiny_variance() -> None:
    problem = make_problem((8, 5, 16, 16), torch.float64)
    problem.x *= 1e-8
    actual, expected = run(layer_for(problem), problem), problem.reference()
    assert_close(actual.output, expected.output, 1e-8)
    torch.testing.assert_close(actual.grad_input, expected.grad_input, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_parameters(dtype: torch.dtype) -> None:
    problem = make_problem((6, 9, 8, 8), dtype, relu=True)
    layer = layer_for(problem).to(dtype)
    rounded = Problem(problem.x, problem.grad, layer.weight, layer.bias, None, True)
    actual, expected = run(layer, problem), rounded.reference()
    for name in ("output", "grad_input", "grad_weight", "grad_bias", "running_mean", "running_var"):
        assert_close(getattr(actual, name), getattr(expected, name), TOLERANCE[dtype])
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == layer.running_mean.dtype == dtype  # type: ignore[union-attr]


def test_without_parameters() -> None:
    problem = make_problem((4, 6, 5, 5), affine=False, residual=True, relu=True)
    layer = layer_for(problem)
    assert layer.weight is None
    assert_passes_close(run(layer, problem), problem.reference(), torch.float32)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_running_statistics_over_batches(momentum: float | None, device: str) -> None:
    ours = SyncBatchNorm(7, momentum=momentum, device=device)
    theirs = torch.nn.BatchNorm2d(7, momentum=momentum)
    for seed in range(5):
        x = make_problem((4, 7, 6, 6), seed=seed).x
        ours(x.to(device))
        theirs(x)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name].cpu(), value, rtol=1e-6, atol=1e-6)
    assert ours.num_batches_tracked is not None
    assert ours.num_batches_tracked.item() == 5


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_evaluation(track: bool, channels_last: bool, device: str) -> None:
    problem = make_problem((4, 6, 5, 5), channels_last=channels_last, residual=True)
    ours = layer_for(problem, device, track_running_stats=track)
    theirs = torch.nn.BatchNorm2d(6, track_running_stats=track)
    theirs.load_state_dict(ours.state_dict())
    if track:
        with torch.no_grad():
            theirs.running_mean.copy_(torch.linspace(-1, 1, 6))  # type: ignore[union-attr]
            theirs.running_var.copy_(torch.linspace(0.5, 2, 6))  # type: ignore[union-attr]
        ours.load_state_dict(theirs.state_dict())
    state = copy.deepcopy(theirs.state_dict())
    actual = run(ours.eval(), problem, device)
    x, z = problem.x.clone().requires_grad_(), problem.residual
    assert z is not None
    output = theirs.eval()(x) + z
    output.backward(problem.grad)
    assert_close(actual.output, output.detach().double(), 1e-5)
    assert x.grad is not None
    assert theirs.weight.grad is not None
    assert_close(actual.grad_input, x.grad.double(), 1e-5)
    assert_close(actual.grad_weight, theirs.weight.grad.double(), 1e-5)
    for name, value in state.items():
        assert torch.equal(ours.state_dict()[name].cpu(), value), f"evaluation changed {name}"


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, 2:8],
        lambda t: t[:, :, 1:4],
        lambda t: t[::2],
        lambda t: t.transpose(2, 3),
        lambda t: t[:, :, :, ::2],
        lambda t: t.transpose(0, 1),
        lambda t: t[:, :, :, :1],
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
    assert x.grad is not None
    assert reference.grad is not None
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


def test_channel_last_is_apexs_shape() -> None:
    x = torch.randn(4, 5, 6, 8)
    z = torch.randn(4, 5, 6, 8)
    apex, ours = SyncBatchNorm(8, channel_last=True, fuse_relu=True), SyncBatchNorm(8)
    expected = (ours(x.movedim(-1, 1)) + z.movedim(-1, 1)).relu().movedim(1, -1)
    output = apex(x, z)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected)


def test_a_frozen_layer() -> None:
    problem = make_problem((4, 6, 5, 5), relu=True)
    layer = layer_for(problem).requires_grad_(False)
    actual = run(layer, problem)
    assert layer.weight.grad is None
    assert_close(actual.grad_input, problem.reference().grad_input, 1e-5)


def test_only_the_parameters_need_gradients() -> None:
    problem = make_problem((4, 6, 5, 5))
    layer = layer_for(problem)
    layer(problem.x).backward(problem.grad)
    expected = problem.reference()
    assert_close(layer.weight.grad, expected.grad_weight, 1e-5)
    assert_close(layer.bias.grad, expected.grad_bias, 1e-5)


def test_nan_and_infinity_stay_in_their_channel() -> None:
    x = torch.randn(4, 3, 5, 5)
    x[0, 1, 2, 2] = torch.nan
    x[1, 2, 0, 0] = torch.inf
    y = SyncBatchNorm(3, fuse_relu=True)(x)
    assert torch.isfinite(y[:, 0]).all()
    assert torch.isnan(y[:, 1]).all()
    assert torch.isnan(y[:, 2]).any()


def test_state_dict_is_batch_norms() -> None:
    ours, theirs = SyncBatchNorm(5), torch.nn.BatchNorm2d(5)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs(torch.randn(3, 5, 4, 4))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 4, 4)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    theirs.load_state_dict(ours.state_dict())


def test_copies_and_pickles() -> None:
    layer = SyncBatchNorm(5, fuse_relu=True, deterministic=True)
    layer(torch.randn(3, 5, 4, 4))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(other, SyncBatchNorm)
        x = torch.randn(3, 5, 4, 4)
        assert torch.equal(copy.deepcopy(layer)(x), other(x))
        assert repr(other) == repr(layer)
        assert other.weight is not layer.weight


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
        lambda: SyncBatchNorm(3)(torch.randn(3)),
        ValueError,
        r"SyncBatchNorm\(3\): expected at least 2D input \(got 1D input\)",
    ),
    "channels": (
        lambda: SyncBatchNorm(3)(torch.randn(2, 4, 5, 5)),
        ValueError,
        r"SyncBatchNorm\(3\): expected input to have num_features = 3 channels in dimension 1, "
        r"got 4",
    ),
    "channels of the last dimension": (
        lambda: SyncBatchNorm(3, channel_last=True)(torch.randn(2, 3, 4)),
        ValueError,
        r"channels in the last dimension, got 4",
    ),
    "integers": (
        lambda: SyncBatchNorm(3)(torch.ones(2, 3, 4, dtype=torch.int64)),
        RuntimeError,
        r"SyncBatchNorm\(3\): expected input to be of dtype float32, float16, bfloat16 or float64, "
        r"got Long",
    ),
    "one value": (
        lambda: SyncBatchNorm(3)(torch.randn(1, 3, 1, 1)),
        ValueError,
        r"SyncBatchNorm\(3\): expected more than 1 value per channel when training, got input size",
    ),
    "residual's sizes": (
        lambda: SyncBatchNorm(3)(torch.randn(2, 3, 4), torch.randn(2, 3, 5)),
        RuntimeError,
        r"SyncBatchNorm\(3\): expected residual to have the sizes of input, \[2, 3, 4\], "
        r"got \[2, 3, 5\]",
    ),
    "residual's dtype": (
        lambda: SyncBatchNorm(3)(torch.randn(2, 3, 4), torch.randn(2, 3, 4).half()),
        RuntimeError,
        r"SyncBatchNorm\(3\): expected residual to be of the dtype of input, Float, got Half",
    ),
    "another device": (
        lambda: SyncBatchNorm(3, device="meta")(torch.randn(2, 3, 4)),
        RuntimeError,
        r"SyncBatchNorm\(3\): expected weight to be on the device of input, cpu, got meta. Move",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_bad_input_changes_nothing() -> None:
    layer = SyncBatchNorm(3)
    state = copy.deepcopy(layer.state_dict())
    for x, z in ((torch.randn(2, 4, 5), None), (torch.randn(2, 3, 4), torch.randn(2, 3, 5))):
        with pytest.raises((ValueError, RuntimeError)):
            layer(x, z)
    for name, value in state.items():
        assert torch.equal(layer.state_dict()[name], value), name
    layer(torch.randn(2, 3, 4))
