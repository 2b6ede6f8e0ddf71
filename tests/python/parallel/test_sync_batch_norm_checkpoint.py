# SPDX-License-Identifier: BSD-3-Clause
"""Forward passes that activation checkpointing repeats: equal to the same model without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from support.processes import join_group, leave_group, run_ranks
from test_sync_batch_norm_autograd import make_model
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torchfuse.parallel import SyncBatchNorm, _repeated_forward

pytestmark = pytest.mark.processes

Region = Callable[[Tensor], Tensor]
# Gradients and statistics.
Result = tuple[list[Tensor], list[Tensor]]


class Results(NamedTuple):
    """What the ranks computed, and how many regions each remembered in the end."""

    ranks: list[dict[tuple[str, int], Result]]
    kept: list[int]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_observes_once(reentrant: bool) -> None:
    """Three segments run the same layers, and are repeated in the reverse order."""
    plain, checkpointed = make_model(), make_model()
    inputs = [torch.randn(4, 3, 6, 6, requires_grad=True) for _ in range(3)]
    sum(plain(x).square().sum() for x in inputs).backward()  # type: ignore[union-attr]
    expected = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    outputs = [checkpoint(checkpointed, x, use_reentrant=reentrant) for x in inputs]
    before = [buffer.clone() for buffer in checkpointed.buffers()]
    sum(y.square().sum() for y in outputs).backward()
    for buffer, old in zip(checkpointed.buffers(), before, strict=True):
        assert torch.equal(buffer, old), "the repeated pass observed the batch again"
    torch.testing.assert_close([*checkpointed.buffers()], [*plain.buffers()])
    for ours, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    for x, grad in zip(inputs, expected, strict=True):
        torch.testing.assert_close(x.grad, grad, rtol=1e-5, atol=1e-5)


def test_a_region_that_is_repeated_outside_of_a_backward_pass_is_not_observed_again() -> None:
    layer = SyncBatchNorm(3)
    y = checkpoint(
        lambda x: layer(x).exp(), torch.randn(4, 3, requires_grad=True), use_reentrant=False
    )
    before = layer.num_batches_tracked.clone()  # type: ignore[union-attr]
    torch.testing.assert_close(y.grad_fn._saved_result, y)
    assert torch.equal(layer.num_batches_tracked, before)  # type: ignore[arg-type]


def boards(*stones: tuple[int, int, int]) -> Tensor:
    """Zeros but for few places, so that a look at some places takes two of them for the same."""
    x = torch.zeros(2, 1, 19, 19, dtype=torch.float64)
    for sample, row, column in stones:
        x[sample, 0, row, column] = 1
    return x


SPARSE = (
    boards((0, 3, 3), (1, 15, 3)),
    boards((0, 2, 5), (0, 3, 15), (0, 9, 9), (1, 9, 3), (1, 15, 15), (1, 10, 10)),
)


@pytest.mark.parametrize("reentrant", [False, True])
def test_sparse_inputs_of_one_layer_are_told_apart(reentrant: bool) -> None:
    def grads(layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor | None]:
        inputs = [x.clone().requires_grad_() for x in SPARSE]
        sum(call(layer, x).pow(3).sum() for x in inputs).backward()  # type: ignore[union-attr]
        return [x.grad for x in inputs]

    def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=reentrant)

    ours = grads(SyncBatchNorm(1, dtype=torch.float64), checkpointed)
    theirs = grads(nn.BatchNorm2d(1).double(), lambda layer, x: layer(x))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_one_process_keeps_nothing() -> None:
    layer = SyncBatchNorm(3)
    y = checkpoint(layer, torch.randn(4, 3, requires_grad=True), use_reentrant=False)
    with torch.no_grad():
        layer(torch.randn(4, 3))
    assert len(_repeated_forward._moments) == 0
    y.sum().backward()


# --- over ranks -------------------------------------------------------------------------------


def _checkpointed(reentrant: bool) -> Callable[[Region, Tensor], Tensor]:
    def call(region: Region, x: Tensor) -> Tensor:
        return checkpoint(region, x, use_reentrant=reentrant)

    return call


def _nested(outer: bool, inner: bool) -> Callable[[Region, Tensor], Tensor]:
    """The inner region is a part of the outer one, which runs the same layers before it."""

    def call(region: Region, x: Tensor) -> Tensor:
        return _checkpointed(outer)(lambda x: _checkpointed(inner)(region, region(x)), x)

    return call


def _saved_on_cpu_outside(region: Region, x: Tensor) -> Tensor:
    with save_on_cpu():
        return _checkpointed(reentrant=False)(region, x)


def _saved_on_cpu_inside(region: Region, x: Tensor) -> Tensor:
    def moved(x: Tensor) -> Tensor:
        with save_on_cpu():
            return region(x)

    return _checkpointed(reentrant=False)(moved, x)


def _saved_on_cpu_alone(region: Region, x: Tensor) -> Tensor:
    with save_on_cpu():
        return region(x)


def _to_the_end(region: Region, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return _checkpointed(reentrant=False)(region, x)


def _after_passes_that_nobody_repeats(region: Region, x: Tensor) -> Tensor:
    """They see the same input on the first rank, and others elsewhere."""
    first = torch.distributed.get_rank() == 0
    with torch.no_grad():
        region(x if first else 3 * x + 1)
    _checkpointed(reentrant=False)(region, x if first else 1 - x)
    return _checkpointed(reentrant=False)(region, x)


def _on_one_rank_only(region: Region, x: Tensor) -> Tensor:
    """The others are not there to answer an exchange of the repeated pass."""
    if torch.distributed.get_rank() > 0:
        return region(x)
    return _checkpointed(reentrant=False)(region, x)


def _plain(region: Region, x: Tensor) -> Tensor:
    return region(x)


def _twice(region: Region, x: Tensor) -> Tensor:
    return region(region(x))


MODES: dict[str, Callable[[Region, Tensor], Tensor]] = {
    "reentrant": _checkpointed(True),
    "without reentrance": _checkpointed(False),
    "nested": _nested(False, False),
    "nested, both reentrant": _nested(True, True),
    "nested, outer reentrant": _nested(True, False),
    "nested, inner reentrant": _nested(False, True),
    "save_on_cpu alone": _saved_on_cpu_alone,
    "save_on_cpu outside": _saved_on_cpu_outside,
    "save_on_cpu inside": _saved_on_cpu_inside,
    "no early stop": _to_the_end,
    "after passes that nobody repeats": _after_passes_that_nobody_repeats,
    "on one rank only": _on_one_rank_only,
}
CALLS = 3
# Samples of each rank.
SIZES = [3, 2, 0]


def _inputs(rank: int) -> list[Tensor]:
    """Those of the first rank are all the same."""
    random = torch.Generator().manual_seed(rank)
    shape = (SIZES[rank], 2, 4, 4)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=random) for _ in range(CALLS)]
    return [inputs[0].clone() for _ in inputs] if rank == 0 else inputs


def _region(first: nn.Module, second: nn.Module) -> Region:
    """The first layer is called twice."""
    return lambda x: first(second(first(2 * x)).sin()).square()


def _run(
    call: Callable[[Region, Tensor], Tensor],
    layers: list[nn.Module],
    inputs: list[Tensor],
    passes: int,
) -> list[Tensor]:
    """Gradients of inputs and of parameters, which `passes` backward passes add up."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    region = _region(layers[0], layers[1])
    # The steps of a loss that weighs the passes differently.
    loss = sum((index + 1) * call(region, x).pow(2).sum() for index, x in enumerate(leaves))
    assert isinstance(loss, Tensor)
    for remaining in reversed(range(passes)):
        loss.backward(retain_graph=remaining > 0)
    grads = [x.grad for x in leaves]
    grads += [parameter.grad for layer in layers for parameter in layer.parameters()]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


def _rank_runs_all(rank: int, folder: str) -> None:
    join_group(rank, len(SIZES), folder, seconds=60)
    results: dict[tuple[str, int], Result] = {}
    for mode, call in MODES.items():
        for passes in (1, 2):
            layers: list[nn.Module] = [SyncBatchNorm(2, dtype=torch.float64) for _ in range(2)]
            grads = _run(call, layers, _inputs(rank), passes)
            statistics = [buffer for layer in layers for buffer in layer.buffers()]
            results[mode, passes] = (grads, statistics)
    # A thread of Gloo keeps the thread-local state of a collective's caller, hooks of checkpointing
    # included, until it comes to drop the work that it has done: a moment after the others know.
    leave_group()
    torch.save((results, len(_repeated_forward._moments)), f"{folder}/{rank}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(_rank_runs_all, str(folder), ranks=len(SIZES))
    loaded = [torch.load(folder / str(rank)) for rank in range(len(SIZES))]
    return Results([results for results, _ in loaded], [kept for _, kept in loaded])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_pooled_batch(mode: str, passes: int, results: Results) -> None:
    own = [result[mode, passes] for result in results.ranks]
    call = _twice if mode.startswith("nested") else _plain
    layers: list[nn.Module] = [nn.BatchNorm2d(2).double() for _ in range(2)]
    parts = [_inputs(rank) for rank in range(len(SIZES))]
    pooled = [torch.cat(of_call) for of_call in zip(*parts, strict=True)]
    expected = _run(call, layers, pooled, passes)
    together = [torch.cat([grads[i] for grads, _ in own]) for i in range(CALLS)]
    together += [
        torch.stack([grads[i] for grads, _ in own]).sum(0) for i in range(CALLS, len(expected))
    ]
    torch.testing.assert_close(together, expected, rtol=1e-8, atol=1e-8)
    if mode != "after passes that nobody repeats":  # they were observed
        buffers = [buffer for layer in layers for buffer in layer.buffers()]
        for _, statistics in own:
            torch.testing.assert_close(statistics, buffers, rtol=1e-8, atol=1e-8)


def test_nothing_is_kept_once_the_graph_is_gone(results: Results) -> None:
    assert results.kept == [0] * len(SIZES)
