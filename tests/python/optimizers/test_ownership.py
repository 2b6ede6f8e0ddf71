# SPDX-License-Identifier: BSD-3-Clause
"""Parameters and state belong to the program: what it lets go of after a step is free at once."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchfuse.optimizers import FusedAdam, FusedOptimizer
from torchfuse.testing.optim_specs import OPTIM_SPECS, OptimSpec


class Model(torch.nn.Module):
    """Owns its optimizer, and a gradient hook that knows the model: two reference cycles."""

    opt: torch.optim.Optimizer
    handle: RemovableHandle

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.opt = cls(self.parameters())
        self.handle = self.layer.weight.register_hook(lambda grad: self.seen(grad))

    def seen(self, grad: Tensor) -> None:
        assert grad.shape == self.layer.weight.shape


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW])
def test_cycles_through_an_optimizer_are_collected(cls: type[torch.optim.Optimizer]) -> None:
    alive = []
    for _ in range(5):
        model = Model(cls)
        model.layer(torch.randn(2, 8)).sum().backward()
        model.opt.step()
        alive.append(weakref.ref(model))
        del model
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def _stepped(spec: OptimSpec, count: int = 3) -> tuple[list[torch.nn.Parameter], FusedOptimizer]:
    params = [torch.nn.Parameter(torch.randn(16, 4)) for _ in range(count)]
    optimizer = spec.optimizer(params, **spec.grid[0])
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return params, optimizer


def _references(values: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """How often each tensor is referred to from Python and from C++."""
    return {name: (sys.getrefcount(values[name]), values[name]._use_count()) for name in values}


@pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.optimizer.__name__)
def test_a_step_leaves_no_reference_behind(spec: OptimSpec) -> None:
    params, optimizer = _stepped(spec)
    for p in params:
        # torch.utils.swap_tensors asks for these two numbers.
        assert weakref.getweakrefs(p) == []
        assert p._use_count() == 1
        state = {k: v for k, v in optimizer.state[p].items() if isinstance(v, Tensor)}
        optimizer.state[p].clear()
        unused = {name: torch.ones(1) for name in state}
        assert _references(state) == _references(unused)
    grads = [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
    assert [ref() for ref in grads] == [None] * len(grads)


def test_modules_convert_and_load_by_swapping() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = FusedAdam(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    weights = {name: value + 1 for name, value in model.state_dict().items()}
    for p in model.parameters():
        p.grad = None
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(weights)
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert_same_bits(model.weight.detach(), weights["weight"].bfloat16(), "weight")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_tensor_at_a_dead_ones_address_is_judged_by_what_it_is() -> None:
    """Memory of deleted tensors is given to the next ones: addresses alone say nothing."""
    p = torch.nn.Parameter(torch.randn(64))
    optimizer = FusedAdam([p])
    p.grad = torch.randn(64)
    optimizer.step()
    state = optimizer.state[p]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        del state["exp_avg"]
        state["exp_avg"] = torch.zeros(64, dtype=dtype)
        if dtype == torch.float64:
            with pytest.raises(RuntimeError, match=r"FusedAdam\.step: expected exp_avg of params"):
                optimizer.step()
        else:
            optimizer.step()
            assert state["exp_avg"].dtype == dtype
            assert bool((state["exp_avg"] != 0).any())


@pytest.mark.parametrize("container", [list, tuple])
def test_params_of_a_group_may_be_any_sequence(container: type) -> None:
    params, optimizer = _stepped(OPTIM_SPECS[0])
    optimizer.param_groups[0]["params"] = container(params)
    before = params[0].detach().clone()
    optimizer.step()
    assert not torch.equal(params[0], before)


class Text(str):
    """A str by inheritance, as NumPy's are."""

    __slots__ = ()


def test_state_keys_may_be_any_objects() -> None:
    params, optimizer = _stepped(OPTIM_SPECS[0])
    state = optimizer.state[params[0]]
    entries = {Text(name): value for name, value in state.items()}
    key = frozenset({"of the program"})
    state.clear()
    state.update({**entries, key: "anything", "\ud800": 1})
    before = params[0].detach().clone()
    for _ in range(2):
        optimizer.step()
    assert not torch.equal(params[0], before)
    assert float(state["step"]) == 3.0
    count = sys.getrefcount(key)
    del state[key]
    assert sys.getrefcount(key) == count - 1
    optimizer.step()
    assert sys.getrefcount(key) == 2
