# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints that FusedAdam refuses, which leave it as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.adam import make_params, snapshot, train
from support.compare import assert_all_same_bits
from test_fused_adam_state_dict import CONFIGS


def _drop(state_dict: dict[str, Any]) -> None:
    del state_dict["state"][1]["exp_avg_sq"]


def _reshape(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["exp_avg"] = torch.zeros(3, 2)


def _retype(state_dict: dict[str, Any]) -> None:
    entry = state_dict["state"][1]
    entry["exp_avg_sq"] = entry["exp_avg_sq"].to(torch.int64)


def _complex(state_dict: dict[str, Any]) -> None:
    entry = state_dict["state"][1]
    entry["exp_avg"] = entry["exp_avg"].to(torch.complex64)


def _sparse(state_dict: dict[str, Any]) -> None:
    entry = state_dict["state"][1]
    entry["exp_avg"] = entry["exp_avg"].to_sparse()


def _no_step(state_dict: dict[str, Any]) -> None:
    del state_dict["state"][1]["step"]


def _bad_step(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["step"] = torch.zeros(2)


def _fewer_params(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].pop()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, r"(?s)exp_avg_sq.*\b1\b|\b1\b.*exp_avg_sq"),
        (_reshape, r"exp_avg\b"),
        (_retype, r"exp_avg_sq\b"),
        (_complex, r"exp_avg\b"),
        (_sparse, r"exp_avg\b"),
        (_no_step, r"\bstep\b"),
        (_bad_step, r"\bstep\b"),
        (_fewer_params, r"doesn't match the size of optimizer's group"),
    ],
)
def test_bad_state_dict_is_refused_and_the_optimizer_still_works(
    damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    params, control = make_params(), make_params()
    optimizer, untouched = CONFIGS[0].ours(params), CONFIGS[0].ours(control)
    train(optimizer, params, range(3))
    train(untouched, control, range(3))
    bad = copy.deepcopy(optimizer.state_dict())
    damage(bad)
    with pytest.raises((RuntimeError, ValueError, TypeError, KeyError), match=message):
        optimizer.load_state_dict(bad)
    train(optimizer, params, range(3, 6))
    train(untouched, control, range(3, 6))
    assert_all_same_bits(snapshot(optimizer), snapshot(untouched))
