# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam where parameters, gradients and groups come and go."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from support.adam import Config, clone_params, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance, assert_same_bits

from torchfuse.optimizers import FusedAdam

CONFIG = Config(weight_decay=0.1)


def test_none_grads_leave_parameter_and_state_alone(device: str) -> None:
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    for own, optimizer in ((params, ours), (reference, torchs)):
        grads: list[Any] = random_grads(own, 1)
        grads[1] = None
        set_grads(own, grads)
        optimizer.step()
    assert_all_within_tolerance(params, reference)
    assert not ours.state.get(params[1])


def test_changing_grad_sets(device: str) -> None:
    """Every parameter counts its own steps, as in torch."""
    params, reference = make_params(device=device), make_params(device=device)
    ours, torchs = CONFIG.ours(params), CONFIG.torch(reference)
    present = [(0, 1), (), (2,), (0, 1, 2, 3), (3, 1), (0,), (0, 1, 2, 3), (2,)]
    for seed, chosen in enumerate(present):
        for own, optimizer in ((params, ours), (reference, torchs)):
            grads = random_grads(own, seed)
            set_grads(own, [g if i in chosen else None for i, g in enumerate(grads)])
            optimizer.step()
    assert_all_within_tolerance(params, reference)
    for p, r in zip(params, reference, strict=True):
        assert float(ours.state[p]["step"]) == float(torchs.state[r]["step"])


def test_no_gradient_at_all_is_no_step() -> None:
    params = make_params()
    optimizer = CONFIG.ours(params)
    optimizer.step()
    train(optimizer, params, [0])
    before = snapshot(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    after = snapshot(optimizer)
    assert_all_same_bits(after, {k: v for k, v in before.items() if not k.startswith("grad")})


def test_parameters_without_requires_grad_are_left_alone() -> None:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    params = [*make_params([(4,)]), frozen]
    optimizer = CONFIG.ours(params)
    params[0].grad = torch.ones(4)
    optimizer.step()
    assert (frozen == 1).all()


def test_empty_groups(device: str) -> None:
    params, reference = make_params(device=device), make_params(device=device)
    for own, kind in ((params, FusedAdam), (reference, torch.optim.AdamW)):
        groups = [{"params": []}, {"params": own[:1]}, {"params": []}, {"params": own[1:]}]
        train(kind(groups, lr=1e-3, weight_decay=0.1), own, range(5))
    assert_all_within_tolerance(params, reference)


def test_add_param_group_after_steps(device: str) -> None:
    params, reference = make_params(device=device), make_params(device=device)
    for own, optimizer in (
        (params, CONFIG.ours(params[:2])),
        (reference, CONFIG.torch(reference[:2])),
    ):
        train(optimizer, own[:2], range(3))
        optimizer.add_param_group({"params": own[2:], "lr": 1e-2})
        train(optimizer, own, range(3, 10))
    assert_all_within_tolerance(params, reference)


def test_removed_parameters_and_cleared_state() -> None:
    params, reference = make_params(), make_params()
    for own, optimizer in ((params, CONFIG.ours(params)), (reference, CONFIG.torch(reference))):
        train(optimizer, own, range(3))
        del optimizer.param_groups[0]["params"][1]
        train(optimizer, own, range(3, 6))
        optimizer.state.clear()
        train(optimizer, own, range(6, 9))
    assert_all_within_tolerance(params, reference)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_grads_are_never_modified(max_grad_norm: float | None, device: str) -> None:
    params = make_params(device=device)
    optimizer = Config(weight_decay=0.1, maximize=True, adam_w_mode=False).ours(
        params, max_grad_norm=max_grad_norm
    )
    grads = random_grads(params, 1)
    set_grads(params, grads)
    pointers = [p.grad.data_ptr() for p in params]
    versions = [p.grad._version for p in params]
    optimizer.grad_scale = torch.tensor(4.0, device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()
    for p, grad, pointer, version in zip(params, grads, pointers, versions, strict=True):
        assert_same_bits(p.grad, grad)
        assert (p.grad.data_ptr(), p.grad._version) == (pointer, version)


def test_write_back_grads_stores_unscaled_and_clipped_gradients(device: str) -> None:
    params = make_params(device=device)
    optimizer = CONFIG.ours(params, max_grad_norm=0.5, write_back_grads=True)
    grads = random_grads(params, 1)
    set_grads(params, [8.0 * g for g in grads])
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()
    norm = torch.linalg.vector_norm(torch.cat([g.double().reshape(-1) for g in grads]))
    for p, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(p.grad.double(), grad.double() * (0.5 / norm), rtol=5e-6, atol=0)


@pytest.mark.parametrize("write_back_grads", [False, True])
def test_version_counters_bump(write_back_grads: bool) -> None:
    params = make_params()
    optimizer = CONFIG.ours(params, write_back_grads=write_back_grads)
    for seed in range(2):
        set_grads(params, random_grads(params, seed))
        versions = [(p._version, p.grad._version) for p in params]
        optimizer.grad_scale = torch.tensor(2.0, device=params[0].device)
        optimizer.step()
        for index, (p, (param, grad)) in enumerate(zip(params, versions, strict=True)):
            assert p._version > param, f"params[{index}]: the update is invisible to autograd"
            assert (p.grad._version > grad) == write_back_grads, f"grads[{index}]"


def test_backward_through_an_updated_parameter_is_refused() -> None:
    params = make_params([(4,)])
    optimizer = CONFIG.ours(params)
    train(optimizer, params, [0])
    loss = (params[0] * params[0]).sum()
    train(optimizer, params, [1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_steps_are_views_of_separate_elements_of_one_buffer(device: str) -> None:
    params = make_params(device=device)
    optimizer = CONFIG.ours(params)
    train(optimizer, params, range(2))
    steps = [optimizer.state[p]["step"] for p in params]
    assert len({s.data_ptr() for s in steps}) == len(steps), "step tensors share an element"
    assert len({s.untyped_storage().data_ptr() for s in steps}) == 1
    for p, s in zip(params, steps, strict=True):
        assert (s.shape, s.dtype, s.device) == (torch.Size(()), torch.float32, p.device)
        assert float(s) == 2.0


def test_steps_stay_where_they_are_when_parameters_join(device: str) -> None:
    """A captured graph goes on growing the elements that it saw."""
    params = make_params(device=device)
    optimizer = CONFIG.ours(params[:1])
    train(optimizer, params[:1], [0])
    place = optimizer.state[params[0]]["step"].data_ptr()
    for count, joining in enumerate((params[1:2], params[2:]), start=1):
        optimizer.add_param_group({"params": joining})
        train(optimizer, params, [count])
        assert optimizer.state[params[0]]["step"].data_ptr() == place
    assert [float(optimizer.state[p]["step"]) for p in params[:3]] == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_deepcopy_and_pickle(duplicate: Any) -> None:
    params = make_params()
    optimizer = Config(weight_decay=0.1, amsgrad=True).ours(params, max_grad_norm=0.3)
    train(optimizer, params, range(3))
    twin = duplicate(optimizer)
    twin_params = twin.param_groups[0]["params"]
    assert all(a is not b for a, b in zip(params, twin_params, strict=True))
    before = snapshot(optimizer)
    train(twin, twin_params, range(3, 5))
    assert_all_same_bits(snapshot(optimizer), before)
    train(optimizer, params, range(3, 5))
    assert_all_same_bits(snapshot(twin), snapshot(optimizer))
    steps = [twin.state[p]["step"] for p in twin_params]
    assert len({s.data_ptr() for s in steps}) == len(steps)


def test_no_gradient_is_held_after_the_step() -> None:
    params = make_params([(4,)])
    optimizer = CONFIG.ours(params, max_grad_norm=1.0)
    set_grads(params, random_grads(params, 0))
    grad = weakref.ref(params[0].grad)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert grad() is None


def test_the_optimizer_does_not_outlive_its_references() -> None:
    params = make_params([(4,)])
    optimizer = CONFIG.ours(params)
    train(optimizer, params, [0])
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def test_zero_size_parameters_among_others(device: str) -> None:
    params = make_params([(0,), (3, 0), (5,), (0, 2)], device=device)
    copies = clone_params(params)
    train(CONFIG.ours(params), params, range(3))
    train(CONFIG.torch(copies), copies, range(3))
    assert_all_within_tolerance(params, copies)
