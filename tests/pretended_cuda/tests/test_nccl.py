# SPDX-License-Identifier: BSD-3-Clause
"""torch's ProcessGroupNCCL on the pretended NCCL: what its collectives give, in all orders of time.

The expectations are written out from what each rank brings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nccl_ranks
import pytest
import torch
import torch.distributed as dist
from support.cases import run_cases
from torch import Tensor

#: More than the rings between two ranks hold, and no multiple of their size.
LARGE = 300_001
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "int8": torch.int8,
}
OPS = {
    "sum": (dist.ReduceOp.SUM, sum),
    "product": (dist.ReduceOp.PRODUCT, lambda values: torch.tensor(values).prod().item()),
    "min": (dist.ReduceOp.MIN, min),
    "max": (dist.ReduceOp.MAX, max),
    "avg": (dist.ReduceOp.AVG, lambda values: sum(values) // len(values)),
}


def _of(rank: int, count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank brings: 2 * rank + 1. Means are whole numbers, products fit into all dtypes."""
    return torch.full((count,), 2 * rank + 1, dtype=dtype, device="cuda")


def _ranks() -> int:
    return dist.get_world_size()


def _reduced(rank: int, op: str, dtype: torch.dtype) -> list[float]:
    value = _of(rank, 3, dtype)
    assert dist.all_reduce(value, OPS[op][0]) is None, "a synchronous collective gives no Work"
    return value.tolist()  # type: ignore[no-any-return]


def _gathered(rank: int) -> list[float]:
    """In place: a rank's own part is in the result."""
    result = torch.zeros(2 * _ranks(), device="cuda")
    mine = result[2 * rank : 2 * rank + 2]
    mine.fill_(rank)
    dist.all_gather_into_tensor(result, mine)
    return result.tolist()  # type: ignore[no-any-return]


def _scattered_sum(rank: int) -> list[float]:
    """Rank r gets the sum of the r-th parts; each part says its place."""
    value = torch.arange(_ranks(), device="cuda").repeat_interleave(2).float() + 10 * rank
    result = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(result, value)
    return result.tolist()  # type: ignore[no-any-return]


def _sent_around(rank: int) -> list[float]:
    """To the next rank and from the one before, both at once: one alone would wait forever."""
    value, result = _of(rank, LARGE), torch.empty(LARGE, device="cuda")
    after, before = (rank + 1) % _ranks(), (rank - 1) % _ranks()
    ops = [dist.P2POp(dist.isend, value, after), dist.P2POp(dist.irecv, result, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return result.unique().tolist()  # type: ignore[no-any-return]


def _in_halves(rank: int) -> list[float]:
    """Groups of the even and of the odd ranks."""
    groups = [dist.new_group(list(range(start, _ranks(), 2))) for start in (0, 1)]
    value = _of(rank)
    dist.all_reduce(value, group=groups[rank % 2])
    return value.tolist()  # type: ignore[no-any-return]


def _on_two_streams(rank: int) -> list[float]:
    """The collectives of a group keep their order, whatever streams they come from."""
    values = [_of(rank, 5) * 10**i for i in range(6)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for i, value in enumerate(values):
        stream = streams[(i // 2) % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            dist.all_reduce(value)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return [value[0].item() for value in values]


def _waited_for(rank: int) -> list[float]:
    """The sum is made on NCCL's stream; wait() orders the current stream behind it."""
    value = _of(rank)
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    return (value + 1).tolist()  # type: ignore[no-any-return]


def _in_a_graph(rank: int) -> list[float]:
    value, result = _of(rank), torch.empty(4, device="cuda")
    dist.all_reduce(value.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(value)
        dist.all_reduce(result)
        value.add_(1)
    sums = []
    for _ in range(3):
        graph.replay()
        sums.append(result[0].item())
    return sums


def _replayed_and_ordinary(rank: int) -> list[float]:
    """A replay's collective has its place among the others, when the graph is launched."""
    captured, other = _of(rank), _of(rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(captured)
    for _ in range(2):
        graph.replay()
        dist.all_reduce(other)
    return [captured[0].item(), other[0].item()]


CASES: dict[str, Callable[[int], Any]] = {
    **{
        f"{op} of {name}": partial(_reduced, op=op, dtype=dtype)
        for op in OPS
        for name, dtype in DTYPES.items()
    },
    "gathered": _gathered,
    "scattered sum": _scattered_sum,
    "sent around": _sent_around,
    "in halves": _in_halves,
    "on two streams": _on_two_streams,
    "waited for": _waited_for,
    "in a graph": _in_a_graph,
    "replayed and ordinary": _replayed_and_ordinary,
}


def _expected(name: str, rank: int, ranks: int) -> Any:
    brought = [2 * r + 1 for r in range(ranks)]
    total = sum(brought)
    if " of " in name and name.partition(" ")[0] in OPS:
        return [OPS[name.partition(" ")[0]][1](brought)] * 3  # type: ignore[operator]
    table: dict[str, Callable[[], Any]] = {
        "gathered": lambda: [r for r in range(ranks) for _ in range(2)],
        "scattered sum": lambda: [ranks * rank + 10 * sum(range(ranks))] * 2,
        "sent around": lambda: [brought[(rank - 1) % ranks]],
        "in halves": lambda: [sum(brought[rank % 2 :: 2])] * 4,
        "on two streams": lambda: [total * 10**i for i in range(6)],
        "waited for": lambda: [total + 1] * 4,
        "in a graph": lambda: [total + ranks * i for i in range(3)],
        "replayed and ordinary": lambda: [total * ranks] * 2,
    }
    return table[name]()


@pytest.fixture(
    scope="module",
    params=[(2, 0), (4, 0), (2, 1), (2, 2), (4, 3)],
    ids=lambda param: f"ranks{param[0]}-seed{param[1]}",
)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    ranks, seed = request.param
    join = partial(nccl_ranks.join, seed=seed)
    return run_cases(tmp_path_factory.mktemp("nccl"), ranks, CASES, join)


@pytest.mark.parametrize("name", CASES)
def test_collective(name: str, results: dict[str, list[Any]]) -> None:
    ranks = len(results[name])
    assert results[name] == [_expected(name, rank, ranks) for rank in range(ranks)]


def _unwaited(rank: int) -> list[float]:
    """A flaw: the result is read on a stream that is not ordered behind the sum."""
    results = []
    for _ in range(10):
        value = _of(rank)
        work = dist.all_reduce(value, async_op=True)
        results.append((value + 1)[0].item())
        work.wait()
    return results


def test_a_sum_that_is_not_waited_for_is_read_too_early(tmp_path: Path) -> None:
    join = partial(nccl_ranks.join, seed=1)
    read = run_cases(tmp_path, 2, {"unwaited": _unwaited}, join)["unwaited"]
    assert {1 + 1, 3 + 1} & {value for of_rank in read for value in of_rank}
