# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of every fused optimizer: of other dtypes, of torch, damaged; copies and pickles."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.adam import (
    make_params,
    params_of,
    random_grads,
    set_grads,
    snapshot,
    through_file,
    train,
)
from support.compare import assert_all_same_bits, assert_same_bits
from test_optim_specs import (
    BF16_MASTER,
    FIRST_CASES,
    FP32,
    LAST_CASES,
    MODES,
    SHAPES,
    Case,
    Mode,
    every_optimizer,
    every_storage,
    tensors_of,
)
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp_state

from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.hyper_params import LENGTHS, numbers
from torchfuse.testing import assert_close_to_torch


def params_like(params: Sequence[Tensor], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().to(dtype, copy=True)) for param in params]


# --- Another dtype --------------------------------------------------------------------------------


MODE_PAIRS = [(source, target) for source in MODES for target in MODES if source is not target]


@pytest.mark.combinations
@pytest.mark.parametrize(("source", "target"), MODE_PAIRS, ids=str)
@every_optimizer
def test_a_checkpoint_of_another_dtype_is_converted(
    case: Case, source: Mode, target: Mode, device: str
) -> None:
    params = make_params(SHAPES, source.dtype, device)
    optimizer = case.ours(params, **source.options)
    train(optimizer, params, [1, 2])
    others = params_like(params, target.dtype)
    loaded = case.ours(others, **target.options)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    for param, other in zip(params, others, strict=True):
        mine, saved = loaded.state[other], optimizer.state[param]
        assert float(mine["step"]) == 2.0
        for name, value in tensors_of(saved).items():
            assert_same_bits(mine[name], value.to(mine[name].dtype))
        assert ("master_param" in mine) == ("master_param" in saved)
        if "master_param" in saved:
            assert_same_bits(mine["master_param"], saved["master_param"])

    # Stored, and after the next step too, as this optimizer's own options ask for it.
    fresh_params = params_like(params, target.dtype)
    fresh = case.ours(fresh_params, **target.options)
    for model, tensors in ((loaded, others), (fresh, fresh_params)):
        train(model, tensors, [3])
    for other, like in zip(others, fresh_params, strict=True):
        assert float(loaded.state[other]["step"]) == 3.0
        for name, value in fresh.state[like].items():
            assert loaded.state[other][name].dtype == value.dtype


@every_optimizer
def test_masters_that_a_checkpoint_lacks_are_made_from_the_parameters(
    case: Case, device: str
) -> None:
    params = make_params(SHAPES, device=device)
    optimizer = case.ours(params)
    train(optimizer, params, [1, 2])
    saved = through_file(optimizer.state_dict())
    results = []
    for by_hand in (False, True):
        others = params_like(params, torch.bfloat16)
        loaded = case.ours(others, master_weights=True)
        loaded.load_state_dict(saved)
        assert all("master_param" not in loaded.state[other] for other in others)
        if by_hand:
            for other in others:
                loaded.state[other]["master_param"] = other.detach().float()
        train(loaded, others, [3])
        assert all("master_param" in loaded.state[other] for other in others)
        results.append(snapshot(loaded))
    assert_all_same_bits(*results)


# --- Copies ---------------------------------------------------------------------------------------


@pytest.mark.combinations
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@every_storage
@every_optimizer
def test_a_copy_goes_on_with_the_same_bits(case: Case, mode: Mode, how: str, device: str) -> None:
    params = make_params(SHAPES, mode.dtype, device)
    optimizer = case.ours(params, max_grad_norm=0.5, **mode.options)
    train(optimizer, params, [1, 2])
    both = (optimizer, params)
    if how == "deepcopy":
        copied, others = copy.deepcopy(both)
    else:
        copied, others = pickle.loads(pickle.dumps(both))
    assert type(copied) is case.spec.optimizer
    assert set(map(id, params_of(copied))) == set(map(id, others))
    before = snapshot(optimizer)
    train(copied, others, [3])
    assert_all_same_bits(snapshot(optimizer), before)
    train(optimizer, params, [3])
    assert_all_same_bits(snapshot(copied), snapshot(optimizer))


# --- torch.distributed.checkpoint -----------------------------------------------------------------


class Model(torch.nn.Module):
    """Two layers' worth of named parameters."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(params)


def grouped(case: Case, model: Model, mode: Mode) -> FusedOptimizer:
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 7e-3}]
    return case.ours(groups, **mode.options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)
@every_optimizer
def test_distributed_checkpoint(
    case: Case, mode: Mode, flat: bool, tmp_path: Path, device: str
) -> None:
    """One process, without a process group; the files are those of any number of processes."""
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flat)
    model = Model(make_params(SHAPES[:4], mode.dtype, device))
    optimizer = grouped(case, model, mode)
    train(optimizer, list(model.parameters()), [1, 2])
    saved = {
        "model": model.state_dict(),
        "optimizer": dcp_state.get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path / "checkpoint"), no_dist=True)

    other = Model(make_params(SHAPES[:4], mode.dtype, device, seed=5))
    loaded = grouped(case, other, mode)
    target = {
        "model": other.state_dict(),
        "optimizer": dcp_state.get_optimizer_state_dict(other, loaded, options=options),
    }
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "checkpoint"), no_dist=True)
    other.load_state_dict(target["model"])
    dcp_state.set_optimizer_state_dict(other, loaded, target["optimizer"], options=options)
    rates = [group["lr"] for group in loaded.param_groups]
    assert rates == [group["lr"] for group in optimizer.param_groups]
    assert rates[-1] == 7e-3

    for owner, each in ((model, optimizer), (other, loaded)):
        params = list(owner.parameters())
        set_grads(params, random_grads(params, 3))
        each.step()
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))


# --- torch's layout -------------------------------------------------------------------------------


@every_optimizer
def test_state_dict_has_the_layout_of_torchs(case: Case) -> None:
    """Names and states of others included. Only dtypes differ: DCP gathers their names."""
    params = make_params()
    named = [(f"param{index}", param) for index, param in enumerate(params)]
    groups = [{"params": named[:1]}, {"params": named[1:]}]
    optimizer = case.ours(groups)
    train(optimizer, params, [1])
    optimizer.state["of others"] = {"value": 1}  # type: ignore[index]
    ours, torchs = optimizer.state_dict(), torch.optim.Optimizer.state_dict(optimizer)
    assert list(ours["state"]) == list(torchs["state"])
    for own, reference in zip(ours["param_groups"], torchs["param_groups"], strict=True):
        assert {key: own[key] for key in reference if key != "capturable"} == {
            key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            for key, value in reference.items()
            if key != "capturable"
        }


TORCH_CASES = [
    case for case in (*FIRST_CASES, *LAST_CASES) if case.torchs([torch.zeros(1)]) is not None
]


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_checkpoints_of_torch_go_on_in_ours_and_ours_in_torch(case: Case, device: str) -> None:
    params, theirs = make_params(device=device), make_params(device=device)
    reference = case.torchs(theirs)
    train(reference, theirs, [1, 2])
    # Loading brings the hyper-parameters; an option that torch does not know stays.
    ours = case.ours(params, lr=7.0, max_grad_norm=math.inf, skip_non_finite=True)
    ours.load_state_dict(through_file(reference.state_dict()))
    again = case.torchs(others := make_params(device=device))
    with torch.no_grad():
        for mine, other, their in zip(params, others, theirs, strict=True):
            mine.copy_(their)
            other.copy_(their)
    group = ours.param_groups[0]
    assert (ours.max_grad_norm, ours.skip_non_finite) == (math.inf, True)
    assert group["lr"] == case.hyper["lr"]
    assert not {"foreach", "fused", "differentiable"} & set(group)
    again.param_groups[0]["lr"] = 7.0
    again.load_state_dict(through_file(ours.state_dict()))
    again.param_groups[0]["fused"] = device == "cpu"  # which not all of torch's are on CUDA
    for optimizer, tensors in ((ours, params), (reference, theirs), (again, others)):
        train(optimizer, tensors, [3, 4])
    assert_close_to_torch(params, theirs)
    assert_close_to_torch(others, theirs)
    # One count shared by several parameters would have grown once for each of them.
    for other, their in zip(others, theirs, strict=True):
        if "step" in reference.state[their]:
            assert float(again.state[other]["step"]) == 4.0


@every_optimizer
def test_a_checkpoint_that_turns_clipping_off_is_warned_of(case: Case) -> None:
    saved = case.ours(make_params(), max_grad_norm=None)
    optimizer = case.ours(make_params(), max_grad_norm=0.5)
    message = (
        rf"{case.spec.optimizer.__name__}\.load_state_dict: expected param_groups\[0\]"
        r"\['max_grad_norm'\] to be 0\.5 as in this optimizer, got None\. max_grad_norm is now"
    )
    with pytest.warns(UserWarning, match=message):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.max_grad_norm is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)
@every_optimizer
def test_a_checkpoint_saved_before_the_first_step_loads(case: Case, mode: Mode) -> None:
    params, others = make_params(dtype=mode.dtype), make_params(dtype=mode.dtype)
    loaded, reference = case.ours(others, **mode.options), case.ours(params, **mode.options)
    loaded.load_state_dict(pickle.loads(pickle.dumps(reference.state_dict())))
    train(loaded, others, [1])
    train(reference, params, [1])
    assert_all_same_bits(snapshot(loaded), snapshot(reference))


@every_optimizer
def test_a_checkpoint_follows_the_parameters_to_their_device(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for another one. Its tensors have no values to be checked."""
    params = make_params(dtype=torch.bfloat16)
    optimizer = case.ours(params, master_weights=True)
    optimizer.make_capturable()
    train(optimizer, params, [1])
    saved = optimizer.state_dict()
    of_state = {"step", *(name for state in saved["state"].values() for name in state)}
    # torch moves no tensor of a group.
    assert not of_state & set(saved["param_groups"][0])
    others = [torch.nn.Parameter(param.detach().to("meta")) for param in params]
    loaded = case.ours(others, master_weights=True)
    monkeypatch.setattr(loaded, "_check_group", lambda *_: None)
    loaded.load_state_dict(saved)
    for other, state in zip(params_of(loaded), saved["state"].values(), strict=True):
        devices = {name: t.device.type for name, t in loaded.state[other].items()}
        assert devices == dict.fromkeys(state, "meta")
    for name, info in numbers(optimizer._algorithm).items():
        for group in loaded.param_groups:
            for value in group[name] if name in LENGTHS else [group[name]]:
                moved = isinstance(value, Tensor) and value.device.type == "meta"
                assert moved or info.on_host, name
                assert not (info.on_host and isinstance(value, Tensor)), name


# --- Damage ---------------------------------------------------------------------------------------

DAMAGES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "text": (lambda state: "text", "to be a tensor, got str"),
    "shape": (lambda state: torch.zeros(3, 2), "to have the shape"),
    "whole numbers": (lambda state: state.to(torch.int64), "to be a floating-point tensor, got"),
    "complex": (lambda state: state.to(torch.complex64), "to be a floating-point tensor, got"),
    "sparse": (lambda state: state.to_sparse(), "to be a dense tensor, got layout"),
}
#: States beside which torch's or apex's classes do not count steps.
UNCOUNTED = {"sgd": "momentum_buffer", "adagrad": "sum", "muon": "momentum_buffer"}


@every_optimizer
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(case: Case) -> None:
    params = make_params()
    optimizer = case.ours(params)
    train(optimizer, params, [1])
    before = snapshot(optimizer)

    def expect_refusal(broken: dict[str, Any], message: str) -> None:
        name = case.spec.optimizer.__name__
        with pytest.raises(ValueError, match=rf"{name}\.load_state_dict: expected {message}"):
            optimizer.load_state_dict(broken)
        assert_all_same_bits(snapshot(optimizer), before)

    uncounted = UNCOUNTED.get(case.spec.algorithm)
    # The last parameter of a group stands for all of them.
    for end in itertools.accumulate(len(group["params"]) for group in optimizer.param_groups):
        index = end - 1
        state = optimizer.state[params_of(optimizer)[index]]
        for name in tensors_of(state):
            for change, message in DAMAGES.values():
                broken = copy.deepcopy(optimizer.state_dict())
                broken["state"][index][name] = change(broken["state"][index][name])
                expect_refusal(broken, rf"state\[{index}\]\['{name}'\] {message}")
            # Without a momentum buffer, SGD begins one in its next step, as torch does.
            if name != "momentum_buffer":
                broken = copy.deepcopy(optimizer.state_dict())
                del broken["state"][index][name]
                expect_refusal(broken, rf"state\[{index}\] to hold '{name}'")
        if uncounted not in state:
            broken = copy.deepcopy(optimizer.state_dict())
            del broken["state"][index]["step"]
            expect_refusal(broken, rf"state\[{index}\] or its parameter group to hold 'step'")


# --- Step counts ----------------------------------------------------------------------------------


BOUND = "a whole number of at least 0, and finite, got"
FORM = "a number or a 1-element tensor, got"
BAD_COUNTS: list[tuple[Any, str]] = [
    (-1, BOUND),
    (2.5, BOUND),
    (10**400, BOUND),
    (float("nan"), BOUND),
    (float("inf"), BOUND),
    (torch.tensor(1e300, dtype=torch.float64), BOUND),
    (torch.tensor(-3, dtype=torch.int32), BOUND),
    (torch.zeros(2), FORM),
    ("3", FORM),
]


@pytest.mark.parametrize(("count", "message"), BAD_COUNTS, ids=lambda value: str(value)[:30])
@every_optimizer
def test_counts_that_no_run_has_are_refused(case: Case, count: Any, message: str) -> None:
    optimizer = case.ours(params := make_params())
    train(optimizer, params, [1])
    expected = snapshot(optimizer)
    name = re.escape(type(optimizer).__name__)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["step"] = count
    with pytest.raises(
        ValueError, match=rf"^{name}.load_state_dict: expected state\[1\]\['step'\] to be {message}"
    ):
        optimizer.load_state_dict(saved)
    # apex counts in the groups.
    saved["param_groups"][0]["step"] = count
    with pytest.raises(ValueError, match=rf"^{name}.load_state_dict: expected .*to be {message}"):
        optimizer.load_state_dict(saved)
    assert_all_same_bits(snapshot(optimizer), expected)


@pytest.mark.parametrize(
    "count",
    [0, 3.0, True, 2**30, torch.tensor(7, dtype=torch.int64), torch.tensor([[2.0]]), np.int64(4)],
    ids=str,
)
@every_optimizer
def test_counts_of_every_type_are_taken(case: Case, count: Any) -> None:
    optimizer = case.ours(params := make_params())
    train(optimizer, params, [1])
    saved = copy.deepcopy(optimizer.state_dict())
    # torch.optim.SGD does not count: ours takes a 0 beside a running buffer for 1.
    for state in saved["state"].values():
        for tensor in tensors_of(state).values():
            tensor.zero_()
        state["step"] = count
    optimizer.load_state_dict(saved)
    for param in params:
        assert float(optimizer.state[param]["step"]) == float(count)


@every_optimizer
def test_one_count_for_all_is_copied_for_each(case: Case) -> None:
    optimizer = case.ours(params := make_params())
    train(optimizer, params, [1])
    saved = copy.deepcopy(optimizer.state_dict())
    shared = torch.tensor(7.0)
    for state in saved["state"].values():
        state["step"] = shared
    optimizer.load_state_dict(saved)
    train(optimizer, params, [2])
    assert [float(optimizer.state[param]["step"]) for param in params] == [8.0] * len(params)
    assert float(shared) == 7.0
