# SPDX-License-Identifier: BSD-3-Clause
"""Calls of optimizers that raise the errors which docs/troubleshooting.md quotes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from provocations import param, stepped

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedMixedPrecisionLamb


def shared_option_differs() -> None:
    FusedAdam([{"params": [param()]}, {"params": [param()], "max_grad_norm": 1.0}])


def load_without(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    _, optimizer = stepped()
    state_dict = optimizer.state_dict()
    change(state_dict["state"][0])
    optimizer.load_state_dict(state_dict)


def load_other_groups() -> None:
    FusedAdam([{"params": [param()]}, {"params": [param()]}]).load_state_dict(
        stepped()[1].state_dict()
    )


def load_of(kind: type[torch.optim.Optimizer]) -> None:
    FusedAdam([param()]).load_state_dict(kind([param()]).state_dict())


def load_back_into_fused() -> None:
    weight, optimizer = stepped()
    theirs = torch.optim.AdamW([weight], fused=True)
    theirs.load_state_dict(optimizer.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(theirs)


def listed_twice() -> None:
    weight, optimizer = stepped()
    optimizer.param_groups[0]["params"].append(weight)
    optimizer.step()


def tied() -> None:
    a, b = param(), param()
    b.data = a.data
    for p in (a, b):
        p.grad = torch.ones_like(p)
    FusedAdam([a, b]).step()


def one_state_of_two() -> None:
    a, b = param(), param()
    for p in (a, b):
        p.grad = torch.ones_like(p)
    optimizer = FusedAdam([a, b])
    optimizer.step()
    optimizer.state[b]["exp_avg"] = optimizer.state[a]["exp_avg"]
    optimizer.step()


def one_gradient_of_two() -> None:
    a, b = param(), param()
    a.grad = b.grad = torch.ones_like(a)
    FusedAdam([a, b], max_grad_norm=1.0, write_back_grads="clipped").step()


def betas_third(kind: Any) -> None:
    kind([param()], 1e-3, (0.9, 0.95))


PROVOCATIONS: list[Callable[[], object]] = [
    shared_option_differs,
    tied,
    one_state_of_two,
    one_gradient_of_two,
    load_other_groups,
    load_back_into_fused,
    lambda: load_of(torch.optim.NAdam),
    lambda: load_of(torch.optim.RAdam),
    lambda: FusedAdam([param(dtype=torch.complex64)]),
    lambda: FusedAdam([{"params": [weight := param(), weight]}]),
    lambda: FusedAdam([param()], lr=-1.0),
    lambda: FusedAdam([param()], state_dtype=torch.float64),
    lambda: FusedAdam([param()], store_param_remainders=True),
    lambda: FusedAdam([param()], stochastic_rounding=True),
    lambda: FusedAdam([param()], stochastic_rounding=True, master_weights=True),
    lambda: FusedAdam([param()], master_weights=True, store_param_remainders=True),
    lambda: FusedAdam([param()], master_weights=True, master_weight_dtype=torch.float16),
    lambda: FusedAdam([param()]).step(None, None, None, 2.0),
    lambda: FusedAdam([param()]).step(grad_scaler=GradScaler("cpu")),
    lambda: load_without(lambda state: state.pop("exp_avg")),
    lambda: load_without(lambda state: state.update(exp_avg=torch.zeros(5))),
    lambda: load_without(lambda state: state.update(sum=torch.zeros(5))),
    listed_twice,
    lambda: FusedAdam([param()], fused=True),
    lambda: FusedAdam([param()], foreach=True),
    lambda: FusedAdam([param()], differentiable=True),
    lambda: betas_third(FusedAdam),
    lambda: betas_third(FusedMixedPrecisionLamb),
    lambda: FusedAdam([param()], weight_decay=0.0, amsgrad=1e-8),  # type: ignore[arg-type]
]
