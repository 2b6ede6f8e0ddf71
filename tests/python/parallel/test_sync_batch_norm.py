# SPDX-License-Identifier: BSD-3-Clause
"""SyncBatchNorm in one process: the numbers of nn.BatchNorm, for every layout, dtype and fusion."""

from __future__ import annotations

import copy
import pickle
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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
#: Beside 1 to 69; in channels-last tensors of 96, 192, 320 or 768 channels apex leaves some out.
MORE_CHANNELS = (96, 127, 128, 129, 192, 255, 256, 257, 320, 513, 768, 1000, 2048)


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
    for channels in [*range(1, 70), *MORE_CHANNELS]:
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


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("channel_last", [False, True])
def test_evaluation_of_rows_and_of_apexs_shape(shape: tuple[int, ...], channel_last: bool) -> None:
    """With a residual and a ReLU; apex fails on each of them."""
    if len(shape) > 2 and not channel_last:
        shape = (2, 5, 3, 4)
    ours, theirs = (
        SyncBatchNorm(5, channel_last=channel_last, fuse_relu=True),
        torch.nn.BatchNorm1d(5),
    )
    ours(torch.randn(shape) + 2.0)
    theirs.load_state_dict(ours.state_dict())
    x, z = torch.randn(shape), torch.randn(shape)
    place = 1 if not channel_last or len(shape) == 2 else -1
    rows = theirs.eval()(x.movedim(place, -1).reshape(-1, 5)).reshape(x.movedim(place, -1).shape)
    expected = (rows.movedim(-1, place) + z).relu()
    torch.testing.assert_close(ours.eval()(x, z), expected)


def test_running_statistics_are_updated_in_place() -> None:
    """Whoever holds them, such as a CUDA graph or an alias, sees them move."""
    layer = SyncBatchNorm(5)
    buffers = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    before = [(b.data_ptr(), b.clone()) for b in buffers if b is not None]
    layer(torch.randn(4, 5, 2, 2) + 1.0)
    assert len(before) == 3
    for buffer, (address, value) in zip(buffers, before, strict=True):
        assert buffer is not None
        assert buffer.data_ptr() == address
        assert not torch.equal(buffer, value)


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


def test_a_pickle_leaves_the_group_out_and_asks_for_it(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = mesh.get_group()
    layer = SyncBatchNorm(3, process_group=group)
    assert copy.copy(layer).process_group is copy.deepcopy(layer).process_group is group
    loaded = pickle.loads(pickle.dumps(layer))
    x = torch.randn(4, 3)
    assert torch.equal(loaded.eval()(x), layer.eval()(x))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _=None: 2)
    with pytest.raises(RuntimeError, match="expected process_group to be set after the layer was"):
        loaded.train()(x)
    monkeypatch.undo()
    loaded.process_group = group
    assert torch.equal(loaded(x), layer.train()(x))


def test_it_may_have_no_bias() -> None:
    layer, plain = SyncBatchNorm(3, bias=False), nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    torch.testing.assert_close(layer(x), plain(x))
    layer(x).square().sum().backward()
    assert "bias" not in layer.state_dict()
    assert repr(layer).count("bias=False") == 1
    layer.reset_parameters()
    assert torch.equal(layer.running_mean, torch.zeros(3))
