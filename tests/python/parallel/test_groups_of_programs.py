# SPDX-License-Identifier: BSD-3-Clause
"""Process groups that a program writes in Python, without backends or names of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer, SyncBatchNorm
from torchfuse.parallel._ranks import _is_same, check_same, device_of_group, naming


class Done(dist.Work):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Pair(dist.ProcessGroup):
    """Rank 0 of two; rank 1 has the same number in a reduction, or `other`."""

    other: int | None = None
    error: RuntimeError | None = None

    def __init__(self) -> None:
        super().__init__(0, 2)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        if self.error is not None:
            raise self.error
        assert options.reduceOp == dist.ReduceOp.MAX
        if self.other is not None:
            tensors[0].clamp_(min=torch.tensor([self.other, ~self.other]))
        return Done(tensors)

    def getBackendName(self) -> str:
        return "pair"

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.fixture
def pair() -> Iterator[Pair]:
    group = Pair()
    if not hasattr(dist.Backend, "PAIR"):
        dist.Backend.register_backend("pair", lambda *_: _made.pop(), devices=["cpu"])
    _made.append(group)
    dist.init_process_group("pair", rank=0, world_size=2, store=dist.HashStore())
    yield group
    dist.destroy_process_group()


_made: list[Pair] = []


def test_their_ranks_are_compared(pair: Pair) -> None:
    check_same("Example: expected things", ["one"], "Do the same.")
    device = device_of_group(pair)
    assert _is_same(3, pair, device)
    for pair.other in (2, 4):
        assert not _is_same(3, pair, device)


class Gone(RuntimeError):
    """An error of a program, whose class takes more than a text."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"peer {peer} is gone: {reason}")


@pytest.mark.parametrize("error", [RuntimeError("peer 1 is gone"), Gone(1, "a test")])
def test_their_errors_are_kept(pair: Pair, error: RuntimeError) -> None:
    pair.error = error
    expected = (
        "^Example: expected all 2 ranks in the comparison of things within the group's timeout, "
        rf"got in rank 0: {error}\.$"
    )
    with pytest.raises(RuntimeError, match=expected):
        check_same("Example: expected things", ["one"], "Do the same.")


def test_errors_after_the_end_of_a_group_say_so() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    group = dist.group.WORLD
    assert group is not None
    dist.destroy_process_group()
    with (
        pytest.raises(RuntimeError, match=r"got in rank 0: gone\.$"),
        naming("Example", "a", group),
    ):
        raise RuntimeError("gone")


def test_without_a_name_they_are_refused(pair: Pair) -> None:
    model = torch.nn.Linear(2, 2)
    addresses = [param.data_ptr() for param in model.parameters()]
    nameless = "expected process_group to have a name, by which native code finds it, got a Pair"
    with pytest.raises(RuntimeError, match=f"^ShardedOptimizer: {nameless} without"):
        ShardedOptimizer(model.parameters(), FusedAdam)
    assert [param.data_ptr() for param in model.parameters()] == addresses
    with pytest.raises(RuntimeError, match=nameless):
        SyncBatchNorm(2)(torch.ones(3, 2))
