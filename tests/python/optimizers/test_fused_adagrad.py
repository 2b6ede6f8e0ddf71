# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedAdagrad; the formula and the rest are tested from its spec."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from support.adam import clone_params, make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance, assert_same_bits

from torchfuse.optimizers import FusedAdagrad
from torchfuse.testing import OPTIM_SPECS, assert_close_to_torch, assert_error_at_most

PLAIN: dict[str, Any] = {"lr": 1e-3}
DECAYED: dict[str, Any] = {
    "lr": 1e-3,
    "lr_decay": 0.1,
    "weight_decay": 0.05,
    "initial_accumulator_value": 0.5,
    "maximize": True,
}
every_hyper = pytest.mark.parametrize("hyper", [PLAIN, DECAYED], ids=["plain", "decayed"])


def torchs(params: Any, **hyper: Any) -> torch.optim.Adagrad:
    return torch.optim.Adagrad(params, foreach=False, fused=False, **hyper)


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved and loaded by torch.load's safe mode."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_the_positional_arguments_are_those_of_apex() -> None:
    parameters = inspect.signature(FusedAdagrad).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    del positional["params"]
    assert positional == {
        "lr": 1e-2,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "set_grad_none": True,
        "adagrad_w_mode": False,
    }
    assert list(positional) == ["lr", "eps", "weight_decay", "set_grad_none", "adagrad_w_mode"]


def test_apexs_attributes() -> None:
    optimizer = FusedAdagrad(make_params(), 0.1, 1e-8, 0.1, False, True)
    assert (optimizer.adagrad_w_mode, optimizer.set_grad_none) == (1, False)
    optimizer.adagrad_w_mode = 0
    assert optimizer.param_groups[0]["adagrad_w_mode"] is False


@pytest.mark.parametrize("value", [-0.5, float("inf"), float("nan")])
def test_an_initial_value_out_of_range_is_refused(value: float) -> None:
    where = "FusedAdagrad: expected initial_accumulator_value of group {} to be at least 0"
    with pytest.raises(ValueError, match=where.format(0)):
        FusedAdagrad(make_params(), initial_accumulator_value=value)
    optimizer = FusedAdagrad(make_params())
    with pytest.raises(ValueError, match=where.format(1)):
        optimizer.add_param_group(
            {"params": make_params(seed=2), "initial_accumulator_value": value}
        )
    assert len(optimizer.param_groups) == 1


@every_hyper
def test_100_steps_are_as_near_to_fp64_as_torchs(hyper: dict[str, Any], device: str) -> None:
    shapes = ((20_000,), (300, 70))
    params, theirs = make_params(shapes, device=device), make_params(shapes, device=device)
    ours, reference = FusedAdagrad(params, **hyper), torchs(theirs, **hyper)
    spec = next(spec for spec in OPTIM_SPECS if spec.optimizer is FusedAdagrad)
    complete = {"lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False}
    complete |= {"initial_accumulator_value": 0.0, "adagrad_w_mode": False, **hyper}
    oracle = spec.oracle(params, complete)
    for seed in range(100):
        grads = random_grads(params, seed)
        for tensors, optimizer in ((params, ours), (theirs, reference)):
            set_grads(tensors, grads)
            optimizer.step()
        oracle.step(grads)
    assert_close_to_torch(params, theirs)
    assert_error_at_most(params, theirs, oracle.params)


def test_sums_begin_with_each_groups_own_value_also_if_the_first_step_is_skipped(
    device: str,
) -> None:
    params = make_params(device=device)
    optimizer = FusedAdagrad(
        [{"params": params[:2]}, {"params": params[2:], "initial_accumulator_value": 0.25}],
        initial_accumulator_value=0.5,
    )
    optimizer.found_inf = torch.ones((), device=device)
    train(optimizer, params, [0])
    for p, value in zip(params, (0.5, 0.5, 0.25, 0.25), strict=True):
        assert_same_bits(optimizer.state[p]["sum"], torch.full_like(p, value))


@every_hyper
def test_torch_checkpoint_continues_in_ours(hyper: dict[str, Any], device: str) -> None:
    theirs = make_params(device=device)
    reference = torchs(theirs, **hyper)
    train(reference, theirs, range(5))
    params = clone_params(theirs)
    ours = FusedAdagrad(params, lr=1.0, max_grad_norm=1e6)
    ours.load_state_dict(through_file(reference.state_dict()))
    assert ours.param_groups[0]["max_grad_norm"] == 1e6
    assert not {"foreach", "fused", "differentiable"} & set(ours.param_groups[0])
    train(ours, params, range(5, 9))
    train(reference, theirs, range(5, 9))
    assert_all_within_tolerance(params, theirs)


@every_hyper
def test_our_checkpoint_continues_in_torch(hyper: dict[str, Any], device: str) -> None:
    """Also for a parameter that had no gradient until then: torch's has a state from the start."""
    params = make_params(device=device)
    ours = FusedAdagrad(params, **hyper)
    for seed in range(5):
        set_grads(params, [*random_grads(params, seed)[:-1], None])
        ours.step()
    theirs = clone_params(params)
    reference = torch.optim.Adagrad(theirs, lr=1.0)
    reference.load_state_dict(through_file(ours.state_dict()))
    assert not ours.state.get(params[-1]), "saving must not change the optimizer"
    train(ours, params, range(5, 9))
    train(reference, theirs, range(5, 9))
    assert_all_within_tolerance(params, theirs)
    assert [float(reference.state[p]["step"]) for p in theirs] == [9.0, 9.0, 9.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_before_the_first_step(dtype: torch.dtype) -> None:
    params = make_params(dtype=dtype)
    others = clone_params(params)
    ours = FusedAdagrad(params, **DECAYED, master_weights=True)
    loaded = FusedAdagrad(others, master_weights=True)
    loaded.load_state_dict(through_file(ours.state_dict()))
    train(ours, params, range(3))
    train(loaded, others, range(3))
    assert_all_same_bits(snapshot(loaded), snapshot(ours))


def test_apex_checkpoint(device: str) -> None:
    """apex has neither step counts nor lr_decay."""
    theirs = make_params(device=device)
    reference = torchs(theirs, lr=1e-3, weight_decay=0.05)
    train(reference, theirs, range(3))
    saved = reference.state_dict()
    group = {"lr": 1e-3, "eps": 1e-10, "weight_decay": 0.05, "params": list(range(len(theirs)))}
    state = {index: {"sum": entry["sum"].clone()} for index, entry in saved["state"].items()}
    params = clone_params(theirs)
    ours = FusedAdagrad(params, lr=1.0)
    ours.load_state_dict({"state": state, "param_groups": [group]})
    train(ours, params, range(3, 6))
    train(reference, theirs, range(3, 6))
    assert_all_within_tolerance(params, theirs)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"step": 3.0}, "to hold 'sum'"),
        ({"step": 3.0, "sum": torch.zeros(2)}, r"'sum'.* to have the shape"),
        ({"step": torch.zeros(2), "sum": torch.ones(33, 5)}, "'step'.* to be a number"),
        ([1.0], "to be a dict, got list"),
    ],
)
def test_bad_states_are_refused_and_the_optimizer_still_works(entry: Any, message: str) -> None:
    params, control = make_params(), make_params()
    ours, untouched = FusedAdagrad(params, **DECAYED), FusedAdagrad(control, **DECAYED)
    train(ours, params, range(2))
    train(untouched, control, range(2))
    bad = copy.deepcopy(ours.state_dict())
    bad["state"][1] = entry
    with pytest.raises(ValueError, match=rf"FusedAdagrad.load_state_dict: .*state\[1\].*{message}"):
        ours.load_state_dict(bad)
    train(ours, params, range(2, 4))
    train(untouched, control, range(2, 4))
    assert_all_same_bits(snapshot(ours), snapshot(untouched))
