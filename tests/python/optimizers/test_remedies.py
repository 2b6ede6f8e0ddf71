# SPDX-License-Identifier: BSD-3-Clause
"""Errors that end with what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam


def adam(groups: int = 1) -> FusedAdam:
    return FusedAdam([{"params": [torch.ones(2, requires_grad=True)]} for _ in range(groups)])


def wrong_amsgrad() -> None:
    FusedAdam([torch.ones(2, requires_grad=True)], amsgrad=1e-8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: adam().step(None, None, None, 2.0),
            r"FusedAdam\.step: expected scale to be None, got float\. .* from a gradient scaler\.",
        ),
        (
            lambda: adam().step(grad_scaler=GradScaler("cpu")),
            r"expected grad_scaler to be None, .* Call grad_scaler\.step\(optimizer\) instead\.",
        ),
        (
            lambda: adam(2).load_state_dict(adam().state_dict()),
            r"different number of parameter groups: .* expected 2 parameter groups, got 1",
        ),
        (
            lambda: GradScaler("cpu").load_state_dict({"scale": 1.0}),
            r"to hold 'growth_factor', got only \['scale'\]\. Load what state_dict\(\) returned\.",
        ),
        (wrong_amsgrad, r"amsgrad .* Pass what was meant for another argument by keyword\."),
    ],
    ids=["scale", "grad_scaler", "groups", "scaler_state", "flag"],
)
def test_an_error_names_the_remedy(call: Callable[[], object], message: str) -> None:
    with pytest.raises((KeyError, RuntimeError, TypeError, ValueError)) as raised:
        call()
    assert raised.match(message)
