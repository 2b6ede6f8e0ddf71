# SPDX-License-Identifier: BSD-3-Clause
"""One entry per fused optimizer, from which its tests are generated.

`tests/python/optimizers/test_optim_specs.py` is parametrised over `OPTIM_SPECS` and fails for an
optimizer without an entry.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchfuse import optimizers
from torchfuse.testing.reference import ReferenceOptimizer, Update, adam_update

HyperParams = Mapping[str, Any]


@dataclass(frozen=True)
class OptimSpec:
    """What an optimizer has to compute.

    Attributes:
        optimizer: the class; its op is `fused_<algorithm>_`.
        update: the formula for one parameter, in fp64. Its states are those of the class, by name.
        grid: hyper-parameters to test, by the names that class and formula share.
        torch_optimizer: the same optimizer of torch.optim, if it has one that should agree.
        updates_from_stored_states: the update is computed from the states as they are stored, after
            they have been rounded to their dtype.

    Example:
        >>> from torchfuse.testing import OPTIM_SPECS
        >>> OPTIM_SPECS[0].op
        'fused_adam_'
    """

    optimizer: type[optimizers.FusedOptimizer]
    update: Update
    grid: tuple[HyperParams, ...]
    torch_optimizer: Callable[..., torch.optim.Optimizer] | None = None
    updates_from_stored_states: bool = False

    @property
    def algorithm(self) -> str:
        """Name of the native step."""
        return self.optimizer._algorithm

    @property
    def op(self) -> str:
        """Name of the op in `torch.ops.torchfuse`."""
        return f"fused_{self.algorithm}_"

    def oracle(
        self, params: Sequence[Tensor], hyper_params: HyperParams, **options: Any
    ) -> ReferenceOptimizer:
        """The formula as an optimizer of copies of `params`."""
        return ReferenceOptimizer(params, self.update, **{**hyper_params, **options})


def grid(**values: Sequence[Any]) -> tuple[HyperParams, ...]:
    """Every combination of the given values.

    Example:
        >>> grid(lr=[0.1], amsgrad=[False, True])
        ({'lr': 0.1, 'amsgrad': False}, {'lr': 0.1, 'amsgrad': True})
    """
    return tuple(
        dict(zip(values, combination, strict=True))
        for combination in itertools.product(*values.values())
    )


def _torch_adam(params: Any, *, adam_w_mode: bool, **hyper_params: Any) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, foreach=False, fused=False, **hyper_params)


def _lamb_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    use_nvlamb: bool = False,
    maximize: bool = False,
    trust_ratio_bounds: tuple[float, float] | None = None,
) -> None:
    beta1, beta2 = betas
    mean = state.setdefault("exp_avg", torch.zeros_like(param))
    square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
    grad = -grad if maximize else grad
    if not adam_w_mode:
        grad = grad + weight_decay * param
    mean.mul_(beta1).add_((1 - beta1 if grad_averaging else 1.0) * grad)
    square.mul_(beta2).add_((1 - beta2) * grad.square())
    bias1 = 1 - beta1**step if bias_correction else 1.0
    bias2 = 1 - beta2**step if bias_correction else 1.0
    update = mean / bias1 / ((square / bias2).sqrt() + eps)
    if adam_w_mode:
        update = update + weight_decay * param
    trust = 1.0
    if (use_nvlamb or weight_decay != 0) and param.norm() > 0 and update.norm() > 0:
        low, high = trust_ratio_bounds or (0.0, math.inf)
        trust = min(max(float(param.norm() / update.norm()), low), high)
    param.sub_(lr * trust * update)


OPTIM_SPECS: tuple[OptimSpec, ...] = (
    OptimSpec(
        optimizer=optimizers.FusedAdam,
        update=adam_update,
        grid=grid(
            lr=[1e-3],
            betas=[(0.9, 0.999)],
            # lr * weight_decay is 5e-5: torch rounds 1 minus it to fp32, for most values with more
            # error than the tolerance.
            weight_decay=[0.0, 5e-2],
            amsgrad=[False, True],
            maximize=[False, True],
            adam_w_mode=[True, False],
        ),
        torch_optimizer=_torch_adam,
    ),
    OptimSpec(
        optimizer=optimizers.FusedLAMB,
        update=_lamb_update,
        grid=grid(
            lr=[1e-3],
            max_grad_norm=[None],
            weight_decay=[0.0, 0.01],
            adam_w_mode=[True, False],
            use_nvlamb=[False, True],
        )
        + grid(lr=[1e-3], max_grad_norm=[None], grad_averaging=[False], maximize=[True])
        + grid(lr=[1e-3], max_grad_norm=[None], trust_ratio_bounds=[(0.0, 0.5), (10.0, math.inf)]),
        updates_from_stored_states=True,
    ),
    # The next entry goes above.
)
