# SPDX-License-Identifier: BSD-3-Clause
"""Process groups that a program writes in Python, without backends or names of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchfuse.parallel._ranks import _is_same, check_same


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

    def __init__(self) -> None:
        super().__init__(0, 2)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
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
    assert _is_same(3, pair)
    for pair.other in (2, 4):
        assert not _is_same(3, pair)
