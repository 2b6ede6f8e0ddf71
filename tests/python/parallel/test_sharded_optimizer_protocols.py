# SPDX-License-Identifier: BSD-3-Clause
"""What programs and torch do with an optimizer, they do with one whose states are split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.cases import run_cases
from support.sharded import make_params, set_grads
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

MASTERS = {"master_weights": True}


def twins(dtype: torch.dtype, **options: Any) -> tuple[ShardedOptimizer, FusedAdam]:
    return (
        ShardedOptimizer(make_params(dtype), FusedAdam, **options),
        FusedAdam(make_params(dtype), **options),
    )


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def equal(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> bool:
    return all(map(torch.equal, params_of(first), params_of(second)))


def state_hooks(rank: int) -> list[str]:
    """All hooks are called, and what they return replaces what they got."""
    optimizer = ShardedOptimizer(make_params(torch.float32), FusedAdam)
    set_grads(params_of(optimizer), 0)
    optimizer.step()
    seen = []
    optimizer.register_state_dict_pre_hook(lambda of: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda of, saved: {**saved, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda of, saved: seen.append(f"loading {saved.pop('mine')}")
    )
    optimizer.register_load_state_dict_post_hook(lambda of: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    return seen


def distributed_checkpoint(rank: int) -> list[float]:
    """torch steps an optimizer with an empty state before it saves one."""
    model = nn.Linear(3, 2)
    optimizer = ShardedOptimizer(model.parameters(), FusedAdam)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer)
    counts = [float(saved["state"]["weight"]["step"])]
    set_optimizer_state_dict(model, optimizer, saved)
    return [*counts, float(optimizer.state_dict()["state"][0]["step"])]


def copy_of_the_part(rank: int) -> bool:
    """Norms and random bits of a copy are those of a part."""
    options: dict[str, Any] = {"stochastic_rounding": True, "max_grad_norm": 0.1}
    own = ShardedOptimizer(make_params(torch.bfloat16), FusedAdam, **options).optim
    copied = copy.deepcopy(own)
    for optimizer in (own, copied):
        for param in params_of(optimizer):
            param.grad = torch.full_like(param, rank + 1.0)
        optimizer.step()
    return equal(own, copied)


def options_of_the_next_step(rank: int) -> list[float]:
    """A scheduler changes them after the step, and the program saves."""
    optimizer, _ = twins(torch.float32, lr=0.125)
    set_grads(params_of(optimizer), 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    whole = optimizer.state_dict()["param_groups"][0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.5
    return [whole, optimizer.sharded_state_dict()["param_groups"][0]["lr"]]


def states(rank: int) -> list[bool]:
    """Programs read states by parameter, also of one that has none, and masters."""
    optimizer, _ = twins(torch.bfloat16, **MASTERS)
    values = params_of(optimizer)
    set_grads(values, 0)
    values[1].grad = None
    before = optimizer.state
    optimizer.step()
    own = [optimizer.state[param].get("exp_avg", torch.empty(0)).numel() for param in values]
    masters = optimizer.param_groups_master
    assert masters is not None
    return [
        not before,
        optimizer.state[values[1]] == {},
        0 < sum(own) < sum(param.numel() for param in values),
        sum(own) == sum(m.numel() for m in masters[0]["params"] if m.dtype == torch.float32),
        list(optimizer.state_dict()["state"]) == [0, 2, 3, 4, 5],
    ]


def other_values(rank: int) -> bool:
    """All ranks begin with the values of rank 0, as behind DistributedDataParallel."""
    optimizers = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        values = make_params(dtype)
        with torch.no_grad():
            for value in values:
                value.add_(rank)
        optimizers.append((ShardedOptimizer(values, FusedAdam), FusedAdam(make_params(dtype))))
    return all(equal(*pair) for pair in optimizers)


def wide_gradients(rank: int) -> bool:
    """16-bit parameters take fp32 gradients, and 16-bit ones again."""
    optimizers = twins(torch.bfloat16, **MASTERS)
    for optimizer in optimizers:
        for step, dtype in enumerate((torch.float32, torch.bfloat16)):
            for param in params_of(optimizer):
                param.grad, param.grad_dtype = None, None
                random = torch.Generator().manual_seed(step)
                grad = torch.randn(param.shape, generator=random).to(dtype)
                param.grad = torch.empty_like(param, dtype=dtype).copy_(grad)
            optimizer.step()
    return equal(*optimizers)


def capturable(rank: int) -> bool:
    optimizers = twins(torch.float32)
    for optimizer in optimizers:
        optimizer.make_capturable()
        optimizer.param_groups[0]["lr"].fill_(0.1)
        set_grads(params_of(optimizer), 0)
        optimizer.step()
    return equal(*optimizers)


def made_in_inference_mode(rank: int) -> bool:
    values = make_params(torch.float32)
    with torch.inference_mode():
        sharded = ShardedOptimizer(values, FusedAdam)
    alone = FusedAdam(make_params(torch.float32))
    for optimizer in (sharded, alone):
        set_grads(params_of(optimizer), 0)
        optimizer.step()
    return equal(sharded, alone)


def other_objects_in_groups(rank: int) -> bool:
    """What the class does not know is the program's, and may differ."""
    groups = [{"params": make_params(torch.float32), "of_rank": rank}]
    optimizer = ShardedOptimizer(groups, FusedAdam)
    set_grads(params_of(optimizer), 0)
    optimizer.step()
    return bool(optimizer.state_dict()["param_groups"][0]["of_rank"] == rank)


def foreign_states(rank: int) -> list[Any]:
    """A state dict with masters beside the states, as apex.amp's, and with entries of a program."""
    sharded, alone = twins(torch.float16, **MASTERS)
    set_grads(params_of(alone), 0)
    alone.step()
    with torch.no_grad():
        for own, other in zip(params_of(sharded), params_of(alone), strict=True):
            own.copy_(other)
    saved = alone.state_dict()
    states = {index: dict(entries) for index, entries in saved["state"].items()}
    masters = {index: entries.pop("master_param") for index, entries in states.items()}
    states[0] |= {"mine": "text", "numbers": torch.ones(2)}
    sharded.load_state_dict({**saved, "state": states, "master_params": masters})
    for optimizer in (sharded, alone):
        set_grads(params_of(optimizer), 1)
        optimizer.step()
    kept = sharded.state_dict()["state"][0]
    return [equal(sharded, alone), kept["mine"], kept["numbers"].tolist()]


EXPECTED: dict[Any, Any] = {
    state_hooks: ["before saving", "loading 1", "loaded"],
    distributed_checkpoint: [1.0, 1.0],
    options_of_the_next_step: [0.25, 0.5],
    copy_of_the_part: True,
    states: [True] * 5,
    other_values: True,
    wide_gradients: True,
    capturable: True,
    made_in_inference_mode: True,
    other_objects_in_groups: True,
    foreign_states: [True, "text", [1.0, 1.0]],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases = {case.__name__: case for case in EXPECTED}
    return run_cases(tmp_path_factory.mktemp("protocols"), 2, cases)


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: case.__name__)
def test_the_split_optimizer_does_what_the_class_alone_does(
    case: Any, results: dict[str, list[Any]]
) -> None:
    assert results[case.__name__] == [EXPECTED[case]] * 2
