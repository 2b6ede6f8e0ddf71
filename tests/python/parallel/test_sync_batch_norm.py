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

from torchfuse.parallel import SyncBatchNorm


def layer_for(problem: Problem, device: str = "cpu", **options: Any) -> SyncBatchNorm:
    affine = problem.weight is not None
    layer = SyncBatchNorm(
        problem.x.size(1),
        affine=affine,
        fuse_relu=problem.relu,
        device=device,
        dtype=torch.float64 if problem.x.dtype == torch.float64 else torch.float32,
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


#: Planes and rows of one and of several pieces, with tails; rows of a batch, one and three axes.
SHAPES = [(4, 3, 5, 7), (2, 257, 9, 9), (1, 5, 97, 101), (33, 300), (4, 8, 50), (2, 6, 3, 4, 5)]
#: Channels last, residual, ReLU, parameters.
KINDS = [
    (False, False, False, True),
    (True, False, True, True),
    (False, True, True, True),
    (True, True, False, False),
]


@pytest.mark.parametrize(("channels_last", "residual", "relu", "affine"), KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_batch_norm(
    dtype: torch.dtype, channels_last: bool, residual: bool, relu: bool, affine: bool, device: str
) -> None:
    options = {"residual": residual, "relu": relu, "affine": affine}
    for shape in SHAPES:
        problem = make_problem(shape, dtype, channels_last=channels_last, **options)
        actual = run(layer_for(problem, device), problem, device)
        assert_passes_close(actual, problem.reference(), dtype)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_number_of_threads_does_not_matter(channels_last: bool) -> None:
    problem = make_problem((16, 40, 28, 28), channels_last=channels_last, relu=True)
    passes = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        passes.append(run(layer_for(problem), problem))
    for name, value in vars(passes[0]).items():
        assert value is None or torch.equal(getattr(passes[1], name), value), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_parameters(dtype: torch.dtype) -> None:
    problem = make_problem((6, 9, 8, 8), dtype, relu=True)
    layer = layer_for(problem).to(dtype)
    rounded = Problem(problem.x, problem.grad, layer.weight, layer.bias, None, True)
    actual, expected = run(layer, problem), rounded.reference()
    for name in ("output", "grad_input", "grad_weight", "grad_bias", "running_mean", "running_var"):
        assert_close(getattr(actual, name), getattr(expected, name), TOLERANCE[dtype])
    assert layer.weight.grad.dtype == layer.running_mean.dtype == dtype  # type: ignore[union-attr]


@pytest.mark.parametrize("momentum", [0.7, None])
def test_running_statistics_over_batches(momentum: float | None, device: str) -> None:
    ours = SyncBatchNorm(7, momentum=momentum, device=device)
    theirs = torch.nn.BatchNorm2d(7, momentum=momentum)
    for seed in range(5):
        x = make_problem((4, 7, 6, 6), seed=seed).x
        ours(x.to(device))
        theirs(x)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name].cpu(), value, rtol=1e-6, atol=1e-6)
    assert ours.num_batches_tracked.item() == 5


@pytest.mark.parametrize("track", [False, True])
def test_evaluation(track: bool, device: str) -> None:
    problem = make_problem((4, 6, 5, 5), channels_last=track, residual=True)
    ours = layer_for(problem, device, track_running_stats=track)
    theirs = torch.nn.BatchNorm2d(6, track_running_stats=track)
    theirs.load_state_dict(ours.state_dict())
    theirs(problem.x + 2.0)  # moves the statistics
    ours.load_state_dict(theirs.state_dict())
    state = copy.deepcopy(theirs.state_dict())
    actual = run(ours.eval(), problem, device)
    x, z = problem.x.clone().requires_grad_(), problem.residual
    output = theirs.eval()(x) + z
    theirs.zero_grad()
    output.backward(problem.grad)
    assert_close(actual.output, output.detach().double(), 1e-5)
    assert_close(actual.grad_input, x.grad.double(), 1e-5)
    assert_close(actual.grad_weight, theirs.weight.grad.double(), 1e-5)
    for name, value in state.items():
        assert torch.equal(ours.state_dict()[name].cpu(), value), f"evaluation changed {name}"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 4, 5)], ids=str)
def test_channel_last_is_apexs_shape(shape: tuple[int, ...], training: bool) -> None:
    """With a residual and a ReLU; apex fails on rows, and on each of them in evaluation."""
    ours = SyncBatchNorm(5, channel_last=True, fuse_relu=True)
    theirs = torch.nn.BatchNorm1d(5)
    ours(torch.randn(shape) + 2.0)
    theirs.load_state_dict(ours.state_dict())
    x, z = torch.randn(shape), torch.randn(shape)
    expected = (theirs.train(training)(x.reshape(-1, 5)).reshape(shape) + z).relu()
    output = ours.train(training)(x, z)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected)


def test_running_statistics_are_updated_in_place() -> None:
    """Whoever holds them, such as a CUDA graph or an alias, sees them move."""
    layer = SyncBatchNorm(5)
    buffers = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    before = [(b.data_ptr(), b.clone()) for b in buffers if b is not None]
    layer(torch.randn(4, 5, 2, 2) + 1.0)
    assert len(before) == 3
    for buffer, (address, value) in zip(buffers, before, strict=True):
        assert buffer.data_ptr() == address
        assert not torch.equal(buffer, value)


def test_either_the_input_or_the_parameters_may_need_no_gradients() -> None:
    problem = make_problem((4, 6, 5, 5), relu=True)
    expected = problem.reference()
    layer = layer_for(problem)
    layer(problem.x).backward(problem.grad)
    assert_close(layer.weight.grad, expected.grad_weight, 1e-5)
    assert_close(layer.bias.grad, expected.grad_bias, 1e-5)
    frozen = layer_for(problem).requires_grad_(False)
    assert_close(run(frozen, problem).grad_input, expected.grad_input, 1e-5)
    assert frozen.weight.grad is None


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
