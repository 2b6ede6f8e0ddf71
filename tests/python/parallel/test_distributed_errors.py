# SPDX-License-Identifier: BSD-3-Clause
"""What DistributedDataParallel and Reducer refuse, and in which words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import message_of, run_cases
from torch import nn

from torchfuse.parallel import DistributedDataParallel, Reducer
from torchfuse.parallel.flat import flat_dist_call

pytestmark = pytest.mark.processes


LAYER = nn.Linear(2, 1)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"message_size": 0}, "expected message_size to be an int of at least 1, got 0."),
        ({"message_size": 1e7}, "expected message_size to be an int of at least 1, got 100000"),
        ({"num_allreduce_streams": 0}, "expected num_allreduce_streams to be an int of at least"),
        ({"shared_param": False}, "expected shared_param to be None, got False. Shared parameters"),
        (
            {"gradient_average_split_factor": 2.0},
            "expected gradient_average_split_factor to be None, got 2.0. Pass gradient_predivide_f",
        ),
        ({"gradient_predivide_factor": 0.0}, "expected gradient_predivide_factor to be positive"),
        ({"gradient_predivide_factor": float("nan")}, "to be positive and finite, got nan."),
        ({"gradient_predivide_factor": float("inf")}, "to be positive and finite, got inf."),
        ({"gradient_predivide_factor": "2"}, "to be positive and finite, got '2'."),
        (
            {"delay_allreduce": True, "num_allreduce_streams": 2},
            "expected num_allreduce_streams to be 1 with delay_allreduce=True, got 2.",
        ),
        (
            {"delay_allreduce": True, "allreduce_trigger_params": []},
            "expected allreduce_trigger_params to be None with delay_allreduce=True, got",
        ),
        (
            {"allreduce_trigger_params": [LAYER.weight, torch.ones(1)]},
            "expected allreduce_trigger_params[1] to be a parameter of module, got Tensor.",
        ),
        (
            {"allreduce_communicators": ([None], [None, None]), "num_allreduce_streams": 2},
            "to contain num_allreduce_streams groups and as many streams, at least 2, got "
            "[1, 2] and num_allreduce_streams=2.",
        ),
    ],
)
def test_values_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^DistributedDataParallel: .*{re.escape(message)}"):
        DistributedDataParallel(LAYER, **options)


@pytest.mark.usefixtures("mesh")
def test_a_module_is_expected() -> None:
    with pytest.raises(TypeError, match=r"^DistributedDataParallel: expected module to be a torch"):
        DistributedDataParallel(list(LAYER.parameters()))  # type: ignore[arg-type]


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("make", [DistributedDataParallel, Reducer])
def test_parameters_that_cannot_be_reduced(make: Any) -> None:
    name = make.__name__
    with pytest.raises(
        ValueError, match=rf"^{name}: expected parameter 'weight' of module to have"
    ):
        make(nn.LazyLinear(2))
    message = r"'weight' of module to be on a device of .* \(cpu:gloo,.*\), got meta. Move the mod"
    with pytest.raises(ValueError, match=rf"^{name}: expected parameter {message}"):
        make(nn.Linear(2, 1, device="meta"))


def test_without_a_process_group() -> None:
    message = r"expected torch.distributed to have a process group, got none. Call torch.distribut"
    for name, make in (
        ("DistributedDataParallel", lambda: DistributedDataParallel(LAYER)),
        ("Reducer", lambda: Reducer(LAYER)),
        ("Reducer", lambda: Reducer([torch.ones(1)])),
        ("flat_dist_call", lambda: flat_dist_call([torch.ones(1)], dist.all_reduce)),
    ):
        with pytest.raises(RuntimeError, match=f"^{name}: {message}"):
            make()


@pytest.mark.usefixtures("mesh")
def test_items_that_are_no_tensors() -> None:
    message = r"^Reducer: expected module_or_grads_list\[1\]\[0\] to be a tensor or a list of"
    with pytest.raises(TypeError, match=message):
        Reducer([torch.ones(1), [None]])
    with pytest.raises(TypeError, match=r"expected module_or_grads_list to be .*, got dict\."):
        Reducer({"weight": torch.ones(1)})


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("delay", [False, True])
def test_one_process_trains(delay: bool) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1), delay_allreduce=delay)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
    grad = model.module.weight.grad
    assert isinstance(grad, torch.Tensor)
    assert torch.equal(grad, torch.full((1, 2), 3.0))


# In two processes, all of which raise.


def _differently(rank: int) -> list[nn.Module]:
    """A module of another shape, dtype, number of parameters and of trainable ones."""
    dtype = torch.float64 if rank else torch.float32
    return [
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2 + rank)),
        nn.Linear(2, 1, dtype=dtype),
        nn.Linear(2, 1, bias=rank == 0),
        nn.Linear(2, 1).requires_grad_(rank == 0),
    ]


def differing(rank: int) -> list[str]:
    modules = _differently(rank)
    of_reducer = message_of(lambda: Reducer(modules[0]))
    return [*(message_of(lambda m=m: DistributedDataParallel(m)) for m in modules), of_reducer]


def smaller_group(rank: int) -> str:
    groups = [dist.new_group([index]) for index in range(2)]
    communicators = ([dist.group.WORLD, groups[rank]], [None, None])
    options: Any = {"num_allreduce_streams": 2, "allreduce_communicators": communicators}
    return message_of(lambda: DistributedDataParallel(LAYER, **options))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases = {f.__name__: f for f in (differing, smaller_group)}
    return run_cases(tmp_path_factory.mktemp("errors"), 2, cases)


def test_other_parameters_in_another_process(found: dict[str, list[Any]]) -> None:
    same = "expected the parameters of module to be the same on all ranks, got"
    remedy = "on rank 1. Build the same module on all ranks."
    for shape, dtype, fewer, trainable, of_reducer in found["differing"]:
        for name, message in (("DistributedDataParallel", shape), ("Reducer", of_reducer)):
            assert message == (
                f"RuntimeError: {name}: {same} '1.weight' of shape (2, 2), dtype torch.float32, "
                "requires_grad=True on rank 0 and '1.weight' of shape (3, 2), dtype torch.float32, "
                f"requires_grad=True {remedy}"
            )
        assert "dtype torch.float64, requires_grad=True on rank 1" in dtype
        assert f"{same} 'bias' of shape (1,)" in fewer
        assert f"and none {remedy}" in fewer
        assert f"requires_grad=False {remedy}" in trainable


def test_groups_of_fewer_processes(found: dict[str, list[Any]]) -> None:
    for message in found["smaller_group"]:
        assert message.startswith(
            "ValueError: DistributedDataParallel: expected allreduce_communicators[0][1] to span "
            "all 2 processes, got 1."
        )
