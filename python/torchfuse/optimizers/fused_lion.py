# SPDX-License-Identifier: BSD-3-Clause
"""Lion (Chen et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import StepOptions


class FusedLion(FusedOptimizer):
    r"""Lion in one pass over all parameters. Steps follow the sign of an interpolated momentum.

    With :math:`g` the gradient (negated if `maximize`):

    .. math::
        c &= \beta_1 m + (1 - \beta_1) g \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g \\
        p &\leftarrow p - \gamma \lambda p - \gamma \, \mathrm{sign}(c)

    Args:
        params (Iterable): Parameters or parameter groups. Parameters are fp32, fp16, bf16 or fp64,
            dense and without gaps in memory.
        lr (float | Tensor, default 1e-4): Learning rate :math:`\gamma`. A tensor has one element
            and a floating dtype.
        betas (tuple[float | Tensor, float | Tensor], default (0.9, 0.99)): Interpolation weight
            :math:`\beta_1` and momentum decay rate :math:`\beta_2`, in [0, 1).
        weight_decay (float | Tensor, default 0.0): Decoupled weight decay :math:`\lambda`, at
            least 0.
        maximize (bool, default False): Ascend along the gradient instead of descending.
        exp_avg_dtype (torch.dtype | None, default None): Storage dtype of the momentum `exp_avg`.
            None: `state_dtype`.
        **options: Options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: If a value is out of range or a parameter is unsupported. The message names the
            parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedLion
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedLion([param], lr=0.5)
        >>> param.grad = torch.tensor([3.0, -3.0])
        >>> optimizer.step()
        >>> param.data
        tensor([0.5000, 1.5000])

    Notes:
        Source: X. Chen et al., *Symbolic discovery of optimization algorithms*, 2023.
    """

    _algorithm = "lion"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float | Tensor = 0.0,
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "exp_avg_dtype": exp_avg_dtype,
        }
        super().__init__(params, defaults, **options)
