# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: interchange with torch.optim, exact resume, apex's layout, and bad ones."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from support.adam import Config, clone_params, make_params, snapshot, train
from support.compare import assert_all_same_bits, assert_all_within_tolerance, assert_same_bits

from torchfuse.optimizers import FusedAdam

CONFIGS = [
    Config(weight_decay=0.1),
    Config(weight_decay=0.1, adam_w_mode=False),
    Config(weight_decay=0.1, amsgrad=True, maximize=True),
]


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved and loaded by torch.load's safe mode."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_torch_checkpoint_continues_in_ours(config: Config, device: str) -> None:
    reference = make_params(device=device)
    torchs = config.torch(reference)
    train(torchs, reference, range(5))
    params = clone_params(reference)
    # Other hyper-parameters than the checkpoint's: loading must bring those.
    ours = FusedAdam(params, lr=1.0, adam_w_mode=not config.adam_w_mode)
    ours.load_state_dict(through_file(torchs.state_dict()))
    train(ours, params, range(5, 9))
    train(torchs, reference, range(5, 9))
    assert_all_within_tolerance(params, reference)
    assert ours.param_groups[0]["lr"] == config.lr


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_our_checkpoint_continues_in_torch(config: Config, device: str) -> None:
    params = make_params(device=device)
    ours = config.ours(params)
    train(ours, params, range(5))
    reference = clone_params(params)
    kind = torch.optim.AdamW if config.adam_w_mode else torch.optim.Adam
    torchs = kind(reference, lr=1.0)
    torchs.load_state_dict(through_file(ours.state_dict()))
    train(ours, params, range(5, 9))
    train(torchs, reference, range(5, 9))
    assert_all_within_tolerance(params, reference)
    # One step tensor shared by several parameters would have advanced once for each of them.
    assert all(float(torchs.state[r]["step"]) == 9.0 for r in reference)


def test_torchs_fused_optimizer_continues_from_our_checkpoint() -> None:
    params = make_params()
    ours = CONFIGS[0].ours(params)
    train(ours, params, range(5))
    reference = clone_params(params)
    torchs = torch.optim.AdamW(reference, fused=True)
    torchs.load_state_dict(through_file(ours.state_dict()))
    for group in torchs.param_groups:
        group["fused"] = True
    train(ours, params, range(5, 8))
    train(torchs, reference, range(5, 8))
    assert_all_within_tolerance(params, reference)


def test_options_that_a_torch_checkpoint_does_not_know_are_kept() -> None:
    reference = make_params()
    torchs = torch.optim.AdamW(reference)
    train(torchs, reference, [0])
    options = {"max_grad_norm": 0.5, "write_back_grads": True, "skip_non_finite": True}
    ours = FusedAdam(make_params(), bias_correction=False, **options)
    ours.load_state_dict(torchs.state_dict())
    group = ours.param_groups[0]
    assert {name: group[name] for name in options} == options
    assert group["bias_correction"] is False
    assert not {"foreach", "fused", "differentiable"} & set(group)


def test_adam_checkpoints_choose_the_decay_mode() -> None:
    for kind, adam_w_mode in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        reference = make_params()
        optimizer = kind(reference)
        train(optimizer, reference, [0])
        ours = FusedAdam(make_params(), adam_w_mode=not adam_w_mode)
        ours.load_state_dict(optimizer.state_dict())
        assert bool(ours.param_groups[0]["adam_w_mode"]) is adam_w_mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
def test_resume_is_exact(dtype: torch.dtype, master_weights: bool, device: str) -> None:
    config = Config(weight_decay=0.1, amsgrad=True)
    params = make_params(dtype=dtype, device=device)
    optimizer = config.ours(params, master_weights=master_weights, max_grad_norm=0.5)
    train(optimizer, params, range(4))
    resumed = clone_params(params)
    other = FusedAdam(resumed, master_weights=master_weights, max_grad_norm=0.5)
    other.load_state_dict(through_file(optimizer.state_dict()))
    train(optimizer, params, range(4, 8))
    train(other, resumed, range(4, 8))
    assert_all_same_bits(snapshot(other), snapshot(optimizer))


def test_loading_into_an_optimizer_that_has_stepped() -> None:
    params = make_params()
    optimizer = CONFIGS[0].ours(params)
    train(optimizer, params, range(3))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in params]
    train(optimizer, params, range(3, 6))
    first = snapshot(optimizer)
    for p, value in zip(params, values, strict=True):
        p.data.copy_(value)
    optimizer.load_state_dict(checkpoint)
    train(optimizer, params, range(3, 6))
    assert_all_same_bits(snapshot(optimizer), first)


def test_state_dict_does_not_follow_later_steps_after_deepcopy_and_keys_are_torchs() -> None:
    params = make_params()
    optimizer = CONFIGS[2].ours(params)
    train(optimizer, params, range(2))
    state = optimizer.state_dict()["state"][0]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_moments_stay_fp32_for_16_bit_parameters() -> None:
    """torch casts every floating-point state to its parameter's dtype when loading."""
    params = make_params(dtype=torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True)
    train(optimizer, params, range(3))
    other = FusedAdam(clone_params(params), master_weights=True)
    other.load_state_dict(through_file(optimizer.state_dict()))
    for p, q in zip(params, other.param_groups[0]["params"], strict=True):
        for name, value in optimizer.state[p].items():
            assert_same_bits(other.state[q][name], value, name)
            assert value.dtype == torch.float32


def test_loaded_steps_are_separate_elements_on_the_parameters_device(device: str) -> None:
    params = make_params(device=device)
    torchs = torch.optim.Adam(params)
    train(torchs, params, range(3))
    ours = FusedAdam(clone_params(params))
    state_dict = torchs.state_dict()
    shared = torch.tensor(7.0)
    for state in state_dict["state"].values():
        state["step"] = shared
    ours.load_state_dict(state_dict)
    own = ours.param_groups[0]["params"]
    train(ours, own, [0])
    assert [float(ours.state[p]["step"]) for p in own] == [8.0] * len(own)
    assert all(ours.state[p]["step"].device == p.device for p in own)
    assert float(shared) == 7.0, "loading must copy"


@pytest.mark.parametrize("half_moments", [False, True])
def test_apex_checkpoint(half_moments: bool) -> None:
    """apex counts steps per group, and once stored moments in the parameter's dtype."""
    reference = make_params()
    torchs = torch.optim.AdamW(reference, lr=2e-3, weight_decay=0.1, foreach=False)
    train(torchs, reference, range(3))
    source = torchs.state_dict()
    dtype = torch.float16 if half_moments else torch.float32
    state = {
        index: {name: entry[name].to(dtype) for name in ("exp_avg", "exp_avg_sq")}
        for index, entry in source["state"].items()
    }
    group = {"lr": 2e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
    group |= {"weight_decay": 0.1, "step": 3, "params": list(range(len(reference)))}
    params = clone_params(reference)
    ours = FusedAdam(params)
    ours.load_state_dict({"state": state, "param_groups": [group]})
    if half_moments:
        for r in reference:
            for name in ("exp_avg", "exp_avg_sq"):
                torchs.state[r][name] = torchs.state[r][name].half().float()
    train(ours, params, range(3, 6))
    train(torchs, reference, range(3, 6))
    assert_all_within_tolerance(params, reference)
    assert [float(ours.state[p]["step"]) for p in params] == [6.0] * len(params)
    assert ours.state[params[0]]["exp_avg"].dtype == torch.float32


def test_apex_checkpoint_of_a_capturable_optimizer(device: str) -> None:
    """apex keeps the learning rate and an int32 count on the device."""
    reference = make_params(device=device)
    optimizer = CONFIGS[0].ours(reference)
    train(optimizer, reference, range(3))
    source = optimizer.state_dict()
    state = {
        index: {name: entry[name] for name in ("exp_avg", "exp_avg_sq")}
        for index, entry in source["state"].items()
    }
    group = {key: source["param_groups"][0][key] for key in ("betas", "eps", "weight_decay")}
    group |= {"bias_correction": True, "params": list(range(len(reference)))}
    group |= {"lr": torch.tensor(CONFIGS[0].lr), "step": torch.tensor([3], dtype=torch.int32)}
    params = clone_params(reference)
    ours = FusedAdam(params, capturable=True)
    ours.load_state_dict(through_file({"state": state, "param_groups": [group]}))
    assert [float(ours.state[p]["step"]) for p in params] == [3.0] * len(params)
    assert ours.param_groups[0]["lr"].device == params[0].device
    # The rate went through fp32.
    optimizer.param_groups[0]["lr"] = float(torch.tensor(CONFIGS[0].lr))
    train(ours, params, range(3, 6))
    train(optimizer, reference, range(3, 6))
    assert_all_same_bits(snapshot(ours), snapshot(optimizer))


def test_apex_groups_that_never_stepped_have_no_step_count() -> None:
    params = make_params()
    groups: list[dict[str, Any]] = [
        {"lr": 2e-3, "params": [0, 1], "step": 2},
        {"lr": 3e-3, "params": [2, 3]},
        {"lr": 4e-3, "params": []},
    ]
    state = {
        index: {name: torch.ones_like(params[index]) for name in ("exp_avg", "exp_avg_sq")}
        for index in (0, 1)
    }
    ours = FusedAdam([{"params": params[:2]}, {"params": params[2:]}, {"params": []}])
    ours.load_state_dict({"state": state, "param_groups": groups})
    train(ours, params, [0])
    assert [float(ours.state[p]["step"]) for p in params] == [3.0, 3.0, 1.0, 1.0]
    assert [group["lr"] for group in ours.param_groups] == [2e-3, 3e-3, 4e-3]


def test_step_as_a_python_number() -> None:
    params = make_params()
    optimizer = CONFIGS[0].ours(params)
    train(optimizer, params, range(3))
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["step"] = 3
    resumed = clone_params(params)
    other = FusedAdam(resumed)
    other.load_state_dict(state_dict)
    train(optimizer, params, [3])
    train(other, resumed, [3])
    assert_all_same_bits(snapshot(other), snapshot(optimizer))


def test_states_may_be_loaded_for_some_parameters_only() -> None:
    params, reference = make_params(), make_params()
    for own, optimizer in (
        (params, CONFIGS[0].ours(params)),
        (reference, CONFIGS[0].torch(reference)),
    ):
        train(optimizer, own, range(3))
        state_dict = optimizer.state_dict()
        del state_dict["state"][1]
        optimizer.load_state_dict(state_dict)
        train(optimizer, own, range(3, 6))
    assert_all_within_tolerance(params, reference)


def test_a_checkpoint_that_turns_clipping_off_is_warned_of() -> None:
    saved = FusedAdam([torch.nn.Parameter(torch.ones(2))])
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(2))], max_grad_norm=0.5)
    message = (
        r"FusedAdam\.load_state_dict: expected param_groups\[0\]\['max_grad_norm'\] to be 0\.5 as "
        "in this optimizer, got None: clipping is off now"
    )
    with pytest.warns(UserWarning, match=message):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["max_grad_norm"] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved.state_dict())
        # Without the option, as in torch's checkpoints, the program's stays.
        optimizer.param_groups[0]["max_grad_norm"] = 0.5
        optimizer.load_state_dict(
            torch.optim.AdamW(optimizer.param_groups[0]["params"]).state_dict()
        )
    assert optimizer.param_groups[0]["max_grad_norm"] == 0.5
