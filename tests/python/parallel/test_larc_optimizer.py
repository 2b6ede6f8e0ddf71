# SPDX-License-Identifier: BSD-3-Clause
"""LARC is an optimizer: groups, closures, schedulers and hooks take it as one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, train
from support.larc import INNER, Make, values
from torch.optim import lr_scheduler

from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import LARC

# Groups, state and defaults.


def test_everything_belongs_to_the_optimizer_inside(make: Make) -> None:
    params = make_params()
    inner = make(params)
    optimizer = LARC(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optim is inner
    train(optimizer, params, range(2))
    for _ in range(2):
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert optimizer.defaults is inner.defaults
        # Loading replaces the lists of the optimizer inside.
        inner.load_state_dict(copy.deepcopy(inner.state_dict()))
    optimizer.param_groups = [optimizer.param_groups[0]]
    assert inner.param_groups is optimizer.param_groups


def test_groups_added_later_are_adapted_too() -> None:
    first, second = make_params([(5,), (4,)])
    inner = torch.optim.SGD([first], lr=0.1)
    optimizer = LARC(inner)
    optimizer.add_param_group({"params": [second], "lr": 1.0})
    assert len(inner.param_groups) == 2
    second.grad = torch.full((4,), 1e3)
    before = second.detach().clone()
    optimizer.step()
    # The rate of the layer, not the group's: the step is 0.02 of the parameter's norm.
    change = float((second.detach() - before).norm() / before.norm())
    assert change == pytest.approx(0.02, rel=1e-5)


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_zero_grad(set_grad_none: bool) -> None:
    params = make_params([(3,)])
    optimizer = LARC(FusedAdam(params, set_grad_none=set_grad_none))
    for set_to_none in (None, True, False):
        set_grads(params, [torch.ones(3)])
        optimizer.zero_grad(set_to_none)
        removed = set_grad_none if set_to_none is None else set_to_none
        assert (params[0].grad is None) == removed


def test_repr_names_both() -> None:
    text = repr(LARC(torch.optim.SGD(make_params([(3,)]), lr=0.25), clip=False))
    assert text.startswith("LARC (trust_coefficient=0.02, clip=False, eps=1e-08) around SGD (")
    assert "lr: 0.25" in text


# The step.


def test_a_closure_runs_with_gradients_enabled(make: Make) -> None:
    params, others = make_params(), make_params()
    grads = random_grads(params, 0)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
        loss.backward()
        return loss

    optimizer = LARC(make(params))
    loss = optimizer.step(closure)
    expected = sum(float((p.detach() * g).sum()) for p, g in zip(others, grads, strict=True))
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    set_grads(others, grads)
    assert LARC(make(others)).step() is None
    assert torch.equal(values(params), values(others))


def test_weight_decay_is_restored_also_after_an_error(make: Make) -> None:
    params = make_params()
    inner = make(params)
    decays = [group.get("weight_decay") for group in inner.param_groups]
    seen: list[Any] = []

    def fail(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        seen.extend(group.get("weight_decay") for group in optimizer.param_groups)
        raise ArithmeticError("inside")

    set_grads(params, random_grads(params, 0))
    handle = inner.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="inside"):
        LARC(inner).step()
    handle.remove()
    assert seen in ([0.0], [None])
    assert [group.get("weight_decay") for group in inner.param_groups] == decays
    assert all("weight_decay" in group or decays == [None] for group in inner.param_groups)


def test_decoupled_weight_decay_becomes_part_of_the_gradient() -> None:
    params, others = make_params([(9,)]), make_params([(9,)])
    for own, kind in ((params, torch.optim.AdamW), (others, torch.optim.Adam)):
        set_grads(own, random_grads(own, 0))
        LARC(kind(own, lr=0.01, weight_decay=0.1)).step()
    assert torch.equal(params[0], others[0])


# Schedulers and hooks.


def test_schedulers_change_the_rate_of_both(recwarn: pytest.WarningsRecorder) -> None:
    params = make_params()
    inner = INNER["sgd"](params)
    optimizer = LARC(inner)
    schedulers = [lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, inner)]
    train(optimizer, params, [0])
    for scheduler in schedulers:
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.1 / 4
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]
    # Those that read defaults or metrics.
    lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert inner.param_groups[0]["momentum"] != 0.9
    optimizer = LARC(INNER["sgd"](params))
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for _ in range(2):
        plateau.step(1.0)
    assert optimizer.optim.param_groups[0]["lr"] == pytest.approx(0.01)


def test_hooks_run_once_and_get_larc() -> None:
    params = make_params()
    optimizer = LARC(INNER["sgd"](params))
    calls: list[tuple[str, torch.optim.Optimizer]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda owner, *arguments: calls.append((name, owner))

    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    optimizer.register_state_dict_pre_hook(note("saving"))
    optimizer.register_state_dict_post_hook(note("saved"))
    optimizer.register_load_state_dict_pre_hook(note("loading"))
    optimizer.register_load_state_dict_post_hook(note("loaded"))
    train(optimizer, params, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert [name for name, _ in calls] == [
        *("before", "after", "saving", "saved", "loading", "loaded")
    ]
    assert all(owner is optimizer for _, owner in calls)


def test_hooks_may_replace_a_state_dict() -> None:
    params = make_params([(3,)])
    optimizer = LARC(INNER["sgd"](params))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 1})

    def strip(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 3.0} for group in loaded["param_groups"]]
        return {"state": loaded["state"], "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(strip)
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 3.0
    assert saved["param_groups"][0]["lr"] == 0.1


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer": "sgd"}, TypeError, "optimizer to be a torch.optim.Optimizer, got str"),
        ({"trust_coefficient": 0.0}, ValueError, "trust_coefficient to be a number, finite and ab"),
        ({"trust_coefficient": math.nan}, ValueError, "trust_coefficient to be .*, got nan"),
        ({"trust_coefficient": "1"}, TypeError, "trust_coefficient to be .*, got str"),
        ({"eps": -1e-8}, ValueError, "eps to be a number, finite and at least 0, got -1e-08"),
        ({"eps": math.inf}, ValueError, "eps to be .*, got inf"),
        (
            {"optimizer": torch.optim.LBFGS([torch.ones(3)])},
            TypeError,
            "optimizer to step once .*LB",
        ),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    sgd = torch.optim.SGD(make_params([(3,)]), lr=0.1)
    with pytest.raises(error, match=f"LARC: expected {message}"):
        LARC(**{"optimizer": sgd, **arguments})


@pytest.mark.parametrize(
    ("param", "grad", "message"),
    [
        (torch.ones(4), torch.ones(4).to_sparse(), "dense, got layout torch.sparse_coo. Use"),
        (torch.ones(4, dtype=torch.complex64), torch.ones(4) + 0j, "real, got torch.complex64"),
    ],
    ids=["sparse", "complex"],
)
def test_unsuitable_gradients_are_refused_before_anything_changes(
    param: torch.Tensor, grad: torch.Tensor, message: str
) -> None:
    good, other = make_params([(3,), (2,)])
    good.grad, other.grad = torch.ones(3), torch.ones(2)
    bad = torch.nn.Parameter(param)
    bad.grad = grad
    groups = [{"params": [good], "weight_decay": 0.5}, {"params": [other, bad]}]
    optimizer = LARC(torch.optim.SGD(groups, lr=0.1))
    before = values([good, other])
    where = r"LARC.step: expected the gradient of params\[1\] of group 1 to be "
    with pytest.raises(RuntimeError, match=where + message):
        optimizer.step()
    assert torch.equal(values([good, other]), before)
    assert torch.equal(good.grad, torch.ones(3))
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
