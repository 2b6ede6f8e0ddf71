# SPDX-License-Identifier: BSD-3-Clause
"""Positional arguments and their defaults, which programs for apex rely on."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from torchfuse.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

REQUIRED = "<required parameter>"
MOMENTS = "betas=(0.9, 0.999)"
SIGNATURES = {
    FusedAdam: f"lr=0.001, bias_correction=True, {MOMENTS}, eps=1e-08, adam_w_mode=True, "
    "weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False, master_weights=False",
    FusedSGD: f"lr={REQUIRED}, momentum=0, dampening=0, weight_decay=0, nesterov=False, "
    "wd_after_momentum=False, materialize_master_grads=True, set_grad_none=False",
    FusedLAMB: f"lr=0.001, bias_correction=True, {MOMENTS}, eps=1e-06, weight_decay=0.01, "
    "amsgrad=False, adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, "
    "use_nvlamb=False",
    FusedMixedPrecisionLamb: f"lr=0.001, step=0, bias_correction=True, {MOMENTS}, eps=1e-06, "
    "weight_decay=0.01, amsgrad=False, adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, "
    "use_nvlamb=False, reduced_precision_dtype=None",
    FusedNovoGrad: f"lr=0.001, bias_correction=True, {MOMENTS}, eps=1e-08, weight_decay=0.0, "
    "amsgrad=False, reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, "
    "set_grad_none=True",
    FusedAdagrad: "lr=0.01, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False",
    # apex has no such class.
    FusedLARS: f"lr={REQUIRED}, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, "
    "eps=1e-08, nesterov=False",
}


@pytest.mark.parametrize("kind", SIGNATURES, ids=lambda kind: kind.__name__)
def test_the_positional_arguments_are_those_of_apex(kind: Any) -> None:
    parameters = list(inspect.signature(kind).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[0].name == "params"
    assert ", ".join(f"{p.name}={p.default!r}" for p in positional[1:]) == SIGNATURES[kind]
