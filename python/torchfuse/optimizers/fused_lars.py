# SPDX-License-Identifier: BSD-3-Clause
"""LARS (You, Gitman and Ginsburg 2017)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import required
from typing_extensions import Unpack

from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import StepOptions


class FusedLARS(FusedOptimizer):
    r"""LARS: SGD with momentum whose step for a tensor is proportional to the tensor's norm.

    With :math:`g` the gradient after clipping (negated if `maximize`) and norms over all
    elements of a tensor:

    .. math::
        \ell &= \frac{\eta \lVert p \rVert}
            {\lVert g \rVert + \lambda \lVert p \rVert + \epsilon} \\
        u &= \gamma \, \ell \, (g + \lambda p) \\
        b &\leftarrow \mu b + u \\
        p &\leftarrow p - b \quad \text{(nesterov: } p \leftarrow p - u - \mu b \text{)}

    The local learning rate :math:`\ell` is 1 if either norm is 0.

    Args:
        params (Iterable): Parameters or parameter groups. Parameters are fp32, fp16, bf16 or fp64,
            dense and without gaps in memory.
        lr (float | Tensor): Learning rate :math:`\gamma`, required here or in every group. A tensor
            has one element and a floating dtype.
        momentum (float | Tensor, default 0.9): :math:`\mu`, at least 0.
        weight_decay (float | Tensor, default 0.0): :math:`\lambda`, at least 0.
        trust_coefficient (float | Tensor, default 0.001): :math:`\eta`, at least 0. With a learning
            rate of 1, a step moves a tensor by about this fraction of the tensor's norm.
        eps (float | Tensor, default 1e-8): :math:`\epsilon`, at least 0. The paper does not have
            this term; the default only matters for vanishing gradients.
        nesterov (bool, default False): Use Nesterov momentum. Requires a momentum above 0.
        maximize (bool, default False): Ascend along the gradient instead of descending.
        **options: Options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: If a value is out of range or a parameter is unsupported. The message names the
            parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedLARS
        >>> param = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = FusedLARS([param], lr=0.5, trust_coefficient=0.1)
        >>> param.grad = torch.full((4,), 1000.0)
        >>> optimizer.step()
        >>> param.data
        tensor([0.9500, 0.9500, 0.9500, 0.9500])

    Notes:
        As in the paper, the momentum buffer includes the learning rate, so a new learning rate does
        not affect updates that are already in the buffer. In contrast, apex's `LARC` around SGD
        multiplies the buffer by the current learning rate. With a constant learning rate,
        `clip=False` and nonzero norms, both take the same steps up to rounding.

        The paper adapts every tensor. To exclude biases and normalization layers, pass their
        parameters to a separate `FusedSGD`.

        Source: Y. You, I. Gitman and B. Ginsburg, *Large batch training of convolutional networks*,
        2017, Algorithm 1.
    """

    _algorithm = "lars"

    def __init__(
        self,
        params: Any,
        lr: Any = required,  # torch's sentinel: torch raises its own error for a group without lr
        momentum: float | Tensor = 0.9,
        weight_decay: float | Tensor = 0.0,
        trust_coefficient: float | Tensor = 0.001,
        eps: float | Tensor = 1e-8,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def _check_new_group(self, index: int, group: dict[str, Any]) -> None:
        if group["nesterov"] and float(group["momentum"]) <= 0.0:
            raise ValueError(
                f"{type(self).__name__}: expected nesterov of group {index} to come with a "
                f"momentum above 0, got {float(group['momentum'])}. Set one, or leave nesterov out."
            )
