# SPDX-License-Identifier: BSD-3-Clause
"""Test specifications, one entry per fused optimizer.

`tests/python/optimizers/test_optim_specs.py` generates tests from `OPTIM_SPECS`, and fails if an
optimizer has no entry.
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
from torchfuse.testing.formulas import (
    adagrad_update,
    lamb_update,
    lars_update,
    muon_update,
    novograd_update,
    sgd_update,
)
from torchfuse.testing.reference import ReferenceOptimizer, Update, adam_update

HyperParams = Mapping[str, Any]


@dataclass(frozen=True)
class OptimSpec:
    """Describes an optimizer for tests.

    Attributes:
        optimizer: The class. The name of the op is `fused_<algorithm>_`.
        update: Formula for one parameter in fp64, with the class's state names.
        grid: Hyper-parameters to test, with names that both the class and the formula accept.
        torch_optimizer: Function that creates the equivalent torch.optim optimizer, or returns None
            if torch's optimizer does not support the hyper-parameters. None (default) means that
            torch has no equivalent.
        updates_from_stored_states: Whether the update is computed from states that were already
            rounded to the storage dtype (default False).

    Example:
        >>> from torchfuse.testing import OPTIM_SPECS
        >>> OPTIM_SPECS[0].op
        'fused_adam_'
    """

    optimizer: type[optimizers.FusedOptimizer]
    update: Update
    grid: tuple[HyperParams, ...]
    torch_optimizer: Callable[..., torch.optim.Optimizer | None] | None = None
    updates_from_stored_states: bool = False

    @property
    def algorithm(self) -> str:
        """Name of the native algorithm."""
        return self.optimizer._algorithm

    @property
    def op(self) -> str:
        """Name of the op in `torch.ops.torchfuse`."""
        return f"fused_{self.algorithm}_"

    def oracle(
        self, params: Sequence[Tensor], hyper_params: HyperParams, **options: Any
    ) -> ReferenceOptimizer:
        """Returns a :class:`ReferenceOptimizer` for copies of `params`.

        Args:
            params (Sequence[Tensor]): Initial values.
            hyper_params (Mapping[str, Any]): An entry of `grid`.
            **options: Further arguments for :class:`ReferenceOptimizer`, such as `max_grad_norm`.
        """
        return ReferenceOptimizer(params, self.update, **{**hyper_params, **options})


def grid(**values: Sequence[Any]) -> tuple[HyperParams, ...]:
    """Returns a dict for every combination of the given values.

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


def _torch_sgd(
    params: Any, *, wd_after_momentum: bool, **hyper_params: Any
) -> torch.optim.Optimizer | None:
    if wd_after_momentum:
        return None
    return torch.optim.SGD(params, foreach=False, fused=False, **hyper_params)


def _torch_adagrad(
    params: Any, *, adagrad_w_mode: bool, **hyper_params: Any
) -> torch.optim.Optimizer | None:
    if adagrad_w_mode:
        return None
    return torch.optim.Adagrad(params, foreach=False, fused=False, **hyper_params)


def _lion_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    maximize: bool,
) -> None:
    beta1, beta2 = betas
    grad = -grad if maximize else grad
    momentum = state.setdefault("exp_avg", torch.zeros_like(param))
    direction = (beta1 * momentum + (1 - beta1) * grad).sign()
    momentum.mul_(beta2).add_((1 - beta2) * grad)
    param.sub_(lr * weight_decay * param + lr * direction)


def _muon_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    **hyper_params: Any,
) -> None:
    if param.ndim < 2:
        shared = {key: hyper_params[key] for key in ("lr", "weight_decay") if key in hyper_params}
        adam_update(param, grad, state, step, betas=betas, **{"weight_decay": 0.1, **shared})
    else:
        muon_update(param, grad, state, step, **hyper_params)


OPTIM_SPECS: tuple[OptimSpec, ...] = (
    OptimSpec(
        optimizer=optimizers.FusedAdam,
        update=adam_update,
        grid=grid(
            lr=[1e-3],
            betas=[(0.9, 0.999)],
            # torch rounds 1 - lr * weight_decay to fp32. For most values of lr * weight_decay other
            # than 5e-5, the rounding error exceeds the tolerance.
            weight_decay=[0.0, 5e-2],
            amsgrad=[False, True],
            maximize=[False, True],
            adam_w_mode=[True, False],
        ),
        torch_optimizer=_torch_adam,
    ),
    OptimSpec(
        optimizer=optimizers.FusedLAMB,
        update=lamb_update,
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
    OptimSpec(
        optimizer=optimizers.FusedMixedPrecisionLamb,
        update=lamb_update,
        grid=grid(lr=[1e-3], max_grad_norm=[None], weight_decay=[0.01], use_nvlamb=[False, True]),
        updates_from_stored_states=True,
    ),
    OptimSpec(
        optimizer=optimizers.FusedSGD,
        update=sgd_update,
        grid=(
            # Without momentum, there is no buffer.
            *grid(
                lr=[1e-3],
                momentum=[0.0],
                dampening=[0.0],
                weight_decay=[0.0, 5e-2],
                nesterov=[False],
                wd_after_momentum=[False, True],
                maximize=[False, True],
            ),
            *grid(
                lr=[1e-3],
                momentum=[0.9],
                dampening=[0.0],
                weight_decay=[0.0, 5e-2],
                nesterov=[True],
                wd_after_momentum=[False, True],
                maximize=[False],
            ),
            # With dampening, the first step differs, because it does not dampen the gradient.
            *grid(
                lr=[1e-3],
                momentum=[0.9],
                dampening=[0.0, 0.1],
                weight_decay=[5e-2],
                nesterov=[False],
                wd_after_momentum=[True, False],
                maximize=[False, True],
            ),
        ),
        torch_optimizer=_torch_sgd,
    ),
    OptimSpec(
        optimizer=optimizers.FusedAdagrad,
        update=adagrad_update,
        grid=grid(
            lr=[1e-2],
            eps=[1e-10],
            maximize=[False, True],
            adagrad_w_mode=[True, False],
            weight_decay=[0.0, 5e-2],
            lr_decay=[0.0, 1e-2],
            initial_accumulator_value=[0.0, 0.5],
        ),
        torch_optimizer=_torch_adagrad,
    ),
    OptimSpec(
        optimizer=optimizers.FusedNovoGrad,
        update=novograd_update,
        grid=(
            *grid(lr=[1e-3], norm_type=[2, 0], reg_inside_moment=[True], weight_decay=[0.01]),
            *grid(lr=[1e-3], norm_type=[2, 0], init_zero=[True], weight_decay=[0.0, 0.01]),
            *grid(lr=[1e-3], norm_type=[2, 0], bias_correction=[False], maximize=[True]),
            # Values from the paper.
            *grid(
                lr=[1e-3],
                betas=[(0.95, 0.98)],
                bias_correction=[False],
                grad_averaging=[False],
                reg_inside_moment=[True],
                weight_decay=[1e-3],
            ),
            *grid(lr=[1e-3], grad_averaging=[False], weight_decay=[0.01], maximize=[True]),
        ),
    ),
    OptimSpec(
        optimizer=optimizers.FusedLARS,
        update=lars_update,
        grid=(
            *grid(lr=[1.0], weight_decay=[0.0, 0.05], nesterov=[False, True]),
            *grid(lr=[0.1], momentum=[0.0], trust_coefficient=[0.02], maximize=[True]),
            *grid(
                lr=[0.01],
                trust_coefficient=[0.5],
                eps=[1.0],
                weight_decay=[0.05],
                nesterov=[True],
                maximize=[True],
            ),
        ),
    ),
    OptimSpec(
        optimizer=optimizers.FusedLion,
        update=_lion_update,
        grid=grid(
            lr=[1e-3],
            # With other values, an element's direction may be within a rounding error of 0.
            betas=[(0.85, 0.97)],
            weight_decay=[0.0, 0.1],
            maximize=[False, True],
        ),
    ),
    OptimSpec(
        optimizer=optimizers.FusedMuon,
        update=_muon_update,
        grid=(
            *grid(
                lr=[1e-3],
                weight_decay=[0.0, 0.1],
                nesterov=[False, True],
                adjust_lr_fn=["match_rms_adamw", None],
                ns_dtype=[torch.float32],
            ),
            *grid(
                lr=[1e-3],
                weight_decay=[0.1],
                momentum=[0.5],
                ns_steps=[3],
                adjust_lr_fn=["spectral_unclamped"],
                ns_dtype=[torch.float32],
            ),
        ),
    ),
    # The next entry goes above.
)
