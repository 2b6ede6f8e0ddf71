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
    r"""LAMB: Adam's update of each tensor, scaled to the tensor's norm.

    With :math:`g` the gradient after clipping (negated under `maximize`), :math:`t` the parameter's
    step count and norms over the whole tensor:

    .. math::
        g &\leftarrow g + \lambda p \quad \text{(adam_w_mode=False)} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &\leftarrow \frac{m / (1 - \beta_1^t)}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon} \\
        u &\leftarrow u + \lambda p \quad \text{(adam_w_mode=True)} \\
        p &\leftarrow p - \gamma \frac{\lVert p \rVert}{\lVert u \rVert} u

    The ratio of the norms, the trust ratio, is 1 if either norm is 0 or, without `use_nvlamb`, if
    :math:`\lambda` is 0.

    Args:
        params: parameters or parameter groups, without gaps in memory, of fp32, fp16, bf16 or fp64.
        lr: learning rate :math:`\gamma`, a number or a 1-element float tensor.
        bias_correction: divide by the terms in :math:`\beta^t`; otherwise they are 1.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: :math:`\lambda`.
        amsgrad: must be False; accepted for apex's positional order.
        adam_w_mode: use decoupled weight decay; otherwise add the weight decay to the gradient.
        grad_averaging: weight the gradient in the first moment by :math:`1 - \beta_1`; otherwise
            by 1.
        set_grad_none: `zero_grad()` sets gradients to None instead of filling them with zeros.
        max_grad_norm: clip the norm of the unscaled gradients over all groups, inside the step.
            None: no clipping.
        use_nvlamb: use the trust ratio for tensors without weight decay too.
        maximize: gradient ascent instead of descent.
        trust_ratio_bounds: lower and upper bound of the trust ratio; None: no bounds.
        exp_avg_dtype: dtype of `exp_avg`. None: `state_dtype`.
        exp_avg_sq_dtype: dtype of `exp_avg_sq`. None: `state_dtype`. Prefer bf16 to fp16, in which
            small squares become 0: the update divides by the root of the stored value.
        **options: options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: for a value out of range or an unsupported parameter, naming the group.
        TypeError: for a value of the wrong type, naming the group.
        RuntimeError: if `amsgrad` is True.

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
        Differences from apex.optimizers.FusedLAMB: it also runs on the CPU and with bf16; moments
        are fp32 for 16-bit parameters; gradients are not overwritten; `max_grad_norm` may be None,
        and clipping divides by the norm plus 1e-6, as in torch; steps are counted per parameter.
    """

    _algorithm = "lamb"

    adam_w_mode: int = decoupled_option("adam_w_mode")
    use_nvlamb: bool = group_option(
        "use_nvlamb",
        bool,
        "Whether tensors without weight decay have a trust ratio; of the first group.",
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
