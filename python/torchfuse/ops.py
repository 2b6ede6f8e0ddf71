# SPDX-License-Identifier: BSD-3-Clause
"""Typed and documented functions for operators of torchfuse.

Each calls the operator of the same name in `torch.ops.torchfuse`, which torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["amp_update_scale_", "fused_adam_", "multi_tensor_l2_norm", "multi_tensor_unscale_"]


def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    master_params: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Performs one Adam or AdamW step on lists of tensors, in place.

    The formula is that of :class:`torchfuse.optimizers.FusedAdam`, which also manages the state and
    has less overhead per step.

    Args:
        params: dense tensors of fp32, fp16, bf16 or fp64, with any strides.
        grads: gradients with the sizes of `params`, of any of these dtypes; never modified.
        exp_avgs: first moments, with the sizes and strides of `params`; fp32, bf16 or fp16, or fp64
            for fp64 parameters. They are computed in fp32 (fp64) and rounded when stored.
        exp_avg_sqs: second moments, as `exp_avgs`, of the same dtype or another.
        max_exp_avg_sqs: maxima of the second moments, as `exp_avgs`; empty unless `amsgrad`.
        state_steps: 0-dim fp32 step counts on the parameters' device, each a separate element.
        master_params: fp32 masters of 16-bit parameters, or empty. The master is updated and the
            parameter receives its rounded value. For bf16 parameters also int16 remainders, as
            `FusedAdam(..., store_param_remainders=True)` stores them.
        lr: learning rate.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        weight_decay: weight decay coefficient.
        eps: added to the denominator.
        amsgrad: use the running maximum of the second moment.
        maximize: gradient ascent instead of descent.
        adam_w_mode: use decoupled weight decay; otherwise add the weight decay to the gradient.
        bias_correction: correct both moments for their initialization at zero.
        lr_tensor: 0-dim fp32 or fp64 tensor that replaces `lr`.
        grad_scale: 1-element fp32 loss scale; gradients are multiplied by its reciprocal.
        found_inf: 1-element fp32 flag; if not 0, nothing changes, including the step counts.

    Example:
        >>> import torch
        >>> from torchfuse.ops import fused_adam_
        >>> param, grad = torch.ones(3), torch.ones(3)
        >>> exp_avg, exp_avg_sq, step = torch.zeros(3), torch.zeros(3), torch.zeros(())
        >>> fused_adam_([param], [grad], [exp_avg], [exp_avg_sq], [], [step], [],
        ...             lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8)
        >>> param
        tensor([0.9000, 0.9000, 0.9000])
    """
    torch.ops.torchfuse.fused_adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        master_params,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
        lr_tensor=lr_tensor,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def multi_tensor_unscale_(tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiplies every tensor by `inv_scale` in place and reports non-finite elements.

    Args:
        tensors: any mix of fp32, fp16, bf16 and fp64, all on one device.
        found_inf: 1-element fp32 flag on that device; set to 1 if an element was not finite before
            the multiplication, and never cleared.
        inv_scale: 1-element fp32 factor on that device.

    Example:
        >>> import torch
        >>> from torchfuse.ops import multi_tensor_unscale_
        >>> tensors, found_inf = [torch.tensor([2.0, 4.0])], torch.zeros(())
        >>> multi_tensor_unscale_(tensors, found_inf, torch.tensor(0.5))
        >>> tensors[0], found_inf
        (tensor([1., 2.]), tensor(0.))
    """
    torch.ops.torchfuse.multi_tensor_unscale_(tensors, found_inf, inv_scale)


def multi_tensor_l2_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the L2 norm over all tensors and whether an element is not finite, in one read.

    The sum of squares cannot overflow, and the result is bitwise the same on every run and for any
    number of threads.

    Args:
        tensors: any mix of fp32, fp16, bf16 and fp64, all on one device.

    Returns:
        The norm and the flag (1 or 0), 0-dim fp32 tensors on that device. They have no derivative;
        a backward pass through them raises.

    Example:
        >>> import torch
        >>> from torchfuse.ops import multi_tensor_l2_norm
        >>> multi_tensor_l2_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        (tensor(5.), tensor(0.))
    """
    norm, found_inf = torch.ops.torchfuse.multi_tensor_l2_norm(tensors)
    return norm, found_inf


def amp_update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis_tracker: Tensor | None = None,
    hysteresis: int = 1,
    min_scale: float | None = None,
    max_scale: float | None = None,
    dynamic: bool = True,
    counts: Tensor | None = None,
    history: Tensor | None = None,
) -> None:
    """Updates a loss scale in place after a step, by the rule of torch.amp.GradScaler.

    Args:
        scale: 1-element fp32 loss scale.
        growth_tracker: 1-element int32: consecutive steps without overflow; 0 after a growth.
        found_inf: 1-element fp32 flag, not 0 if the step overflowed.
        growth_factor: multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: number of consecutive steps without overflow before the scale grows.
        hysteresis_tracker: 1-element int32: number of further overflows, without a successful step
            in between, until the scale backs off; required if `hysteresis` > 1.
        hysteresis: number of consecutive overflows after which the scale backs off.
        min_scale: lower bound when the scale backs off; None is 0.
        max_scale: upper bound when the scale grows; None is the largest fp32 number.
        dynamic: if False, only `counts` and `history` are written.
        counts: int64 ``[3]``: updates, overflows, and whether the last update had one.
        history: fp32 ``[n, 2]``, a ring buffer of the last n updates; requires `counts`. Row
            ``updates % n`` receives the scale before the update and whether there was an overflow.

    Example:
        >>> import torch
        >>> from torchfuse.ops import amp_update_scale_
        >>> scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
        >>> amp_update_scale_(scale, tracker, torch.tensor(1.0),
        ...                   growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
        >>> scale
        tensor(4.)
    """
    torch.ops.torchfuse.amp_update_scale_(
        scale,
        growth_tracker,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis_tracker=hysteresis_tracker,
        hysteresis=hysteresis,
        min_scale=min_scale,
        max_scale=max_scale,
        dynamic=dynamic,
        counts=counts,
        history=history,
    )
