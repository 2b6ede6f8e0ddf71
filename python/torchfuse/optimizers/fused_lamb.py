# SPDX-License-Identifier: BSD-3-Clause
"""LAMB (You et al. 2020), in apex's variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import (
    MasterOptions,
    check_no_amsgrad,
    decoupled_option,
    group_option,
)


class FusedLAMB(FusedOptimizer):
    r"""LAMB: Adam whose update of each tensor is scaled to the tensor's norm.

    With :math:`g` the gradient after clipping (negated if `maximize`), :math:`t` the parameter's
    step count and norms over all elements of a tensor:

    .. math::
        g &\leftarrow g + \lambda p \quad \text{(adam_w_mode=False)} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &\leftarrow \frac{m / (1 - \beta_1^t)}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon} \\
        u &\leftarrow u + \lambda p \quad \text{(adam_w_mode=True)} \\
        p &\leftarrow p - \gamma \frac{\lVert p \rVert}{\lVert u \rVert} u

    The trust ratio :math:`\lVert p \rVert / \lVert u \rVert` is 1 if either norm is 0. Without
    `use_nvlamb` it is also 1 if :math:`\lambda` is 0.

    Args:
        params (Iterable): Parameters or parameter groups. Parameters are fp32, fp16, bf16 or fp64,
            dense and without gaps in memory.
        lr (float | Tensor, default 1e-3): Learning rate :math:`\gamma`. A tensor has one element
            and a floating dtype.
        bias_correction (bool, default True): Divide by the terms in :math:`\beta^t`. If False, the
            terms are 1.
        betas (tuple[float | Tensor, float | Tensor], default (0.9, 0.999)): Decay rates
            :math:`\beta_1` and :math:`\beta_2` of the moments, in [0, 1).
        eps (float | Tensor, default 1e-6): :math:`\epsilon`, added to the denominator; at least 0.
        weight_decay (float | Tensor, default 0.01): :math:`\lambda`, at least 0.
        amsgrad (bool, default False): Must be False. Accepted because apex has the argument at this
            position.
        adam_w_mode (bool, default True): Use decoupled weight decay. If False, add the weight decay
            to the gradient.
        grad_averaging (bool, default True): Weight the gradient in the first moment by
            :math:`1 - \beta_1`. If False, the weight is 1.
        set_grad_none (bool, default True): `zero_grad()` sets gradients to None. If False, it fills
            gradients with zeros.
        max_grad_norm (float | None, default 1.0): Maximum norm of the unscaled gradients over all
            groups, clipped inside the step. None disables clipping.
        use_nvlamb (bool, default False): Apply the trust ratio even if `weight_decay` is 0.
        maximize (bool, default False): Ascend along the gradient instead of descending.
        trust_ratio_bounds (tuple[float, float] | None, default None): Lower and upper bound for the
            trust ratio. None disables the bounds.
        exp_avg_dtype (torch.dtype | None, default None): Storage dtype of `exp_avg`. None:
            `state_dtype`.
        exp_avg_sq_dtype (torch.dtype | None, default None): Storage dtype of `exp_avg_sq`. None:
            `state_dtype`. Prefer bf16 to fp16: small squares become 0 in fp16, and the update
            divides by the stored value's square root.
        **options: Options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: If a value is out of range or a parameter is unsupported. The message names the
            parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.
        RuntimeError: If `amsgrad` is True.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedLAMB
        >>> param = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = FusedLAMB([param], lr=0.5, weight_decay=0.0, use_nvlamb=True)
        >>> param.grad = torch.full((4,), 0.1)
        >>> optimizer.step()
        >>> param.data
        tensor([0.5000, 0.5000, 0.5000, 0.5000])

    Notes:
        Differences from apex.optimizers.FusedLAMB:

        - The CPU and bf16 are supported. Moments are fp32 for 16-bit parameters.
        - The step does not overwrite gradients.
        - `max_grad_norm` may be None. Clipping divides by the norm plus 1e-6, as in torch.
        - Steps are counted per parameter.

        Source: Y. You et al., *Large batch optimization for deep learning: training BERT in 76
        minutes*, 2020.
    """

    _algorithm = "lamb"

    adam_w_mode: int = decoupled_option("adam_w_mode")
    use_nvlamb: bool = group_option(
        "use_nvlamb",
        bool,
        "Whether the first group applies the trust ratio without weight decay too (bool). "
        "Setting the property changes all groups.",
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-6,
        weight_decay: float | Tensor = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        *,
        maximize: bool = False,
        trust_ratio_bounds: tuple[float, float] | None = None,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        **options: Unpack[MasterOptions],
    ) -> None:
        check_no_amsgrad(type(self).__name__, amsgrad)
        defaults: dict[str, Any] = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "use_nvlamb": use_nvlamb,
            "maximize": maximize,
            "trust_ratio_bounds": trust_ratio_bounds,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
        }
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, max_grad_norm=max_grad_norm, **options
        )
