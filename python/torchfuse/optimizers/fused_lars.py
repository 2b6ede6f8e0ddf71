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
    r"""LARS: momentum SGD whose step for each tensor is proportional to the tensor's norm.

    With :math:`g` the gradient after clipping (negated under `maximize`) and norms over the whole
    tensor:

    .. math::
        \ell &= \frac{\eta \lVert p \rVert}
            {\lVert g \rVert + \lambda \lVert p \rVert + \epsilon} \\
        u &= \gamma \, \ell \, (g + \lambda p) \\
        b &\leftarrow \mu b + u \\
        p &\leftarrow p - b \quad \text{(nesterov: } p \leftarrow p - u - \mu b \text{)}

    The local rate :math:`\ell` is 1 if either norm is 0.

    Args:
        params: parameters or parameter groups, without gaps in memory, of fp32, fp16, bf16 or fp64.
        lr: learning rate :math:`\gamma`, a number or a 1-element float tensor. Required, here or
            in every group.
        momentum: :math:`\mu`, at least 0.
        weight_decay: :math:`\lambda`, at least 0.
        trust_coefficient: :math:`\eta`, at least 0: a step at a learning rate of 1 moves a tensor
            by about this fraction of its norm.
        eps: :math:`\epsilon`, at least 0. It is not in the paper; the default only matters where
            gradients vanish.
        nesterov: use Nesterov momentum; requires a momentum above 0.
        maximize: gradient ascent instead of descent.
        **options: options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: for a value out of range or an unsupported parameter, naming the group.
        TypeError: for a value of the wrong type, naming the group.

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
        As in the paper, the momentum buffer includes the learning rate, so a change of the learning
        rate does not affect updates that are already in the buffer. In apex's `LARC` around SGD the
        learning rate multiplies the whole buffer. With a constant learning rate, `clip=False` and
        no norm of 0, both take the same steps up to rounding.

        The paper adapts every tensor. To exclude biases and the parameters of normalization layers,
        pass them to a separate `FusedSGD`.

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
