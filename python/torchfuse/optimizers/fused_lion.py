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
    r"""Lion in one pass over all parameters: steps by the sign of an interpolated momentum.

    With :math:`g` the gradient (negated under `maximize`):

    .. math::
        c &= \beta_1 m + (1 - \beta_1) g \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g \\
        p &\leftarrow p - \gamma \lambda p - \gamma \, \mathrm{sign}(c)

    Args:
        params: parameters or parameter groups, without gaps in memory, of fp32, fp16, bf16 or fp64.
        lr: learning rate :math:`\gamma`, a number or a 1-element float tensor.
        betas: interpolation weight of the direction and decay rate of the momentum, in [0, 1).
        weight_decay: :math:`\lambda`, decoupled.
        maximize: gradient ascent instead of descent.
        exp_avg_dtype: dtype of `exp_avg`, the momentum. None: `state_dtype`.
        **options: options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: for a value out of range or an unsupported parameter, naming the group.
        TypeError: for a value of the wrong type, naming the group.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedLion
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedLion([param], lr=0.5)
        >>> param.grad = torch.tensor([3.0, -3.0])
        >>> optimizer.step()
        >>> param.data
        tensor([0.5000, 1.5000])
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
