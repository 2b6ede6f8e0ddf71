# SPDX-License-Identifier: BSD-3-Clause
"""Adam, SGD, Adagrad and NovoGrad steps of apex's amp_C.

Moments and other states may be fp32, fp16 or bf16. For fp64 parameters, states must be fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchfuse._C import fused_adagrad_, fused_adam_, fused_sgd_
from torchfuse.apex.native._arguments import (
    Scalar,
    TensorLists,
    as_flag,
    check_masters,
    check_vector,
    check_wide_states,
    checked_lists,
    copy_unless,
    counts_before,
    learning_rate,
    on_device,
)
from torchfuse.ops import multi_tensor_unscale_

_LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Performs one Adam step on lists of tensors in place.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Ignored as in apex: non-finite gradients propagate.
        tensor_lists (Sequence): Gradients, parameters, first moments, second moments.
        lr (float | Tensor): Learning rate.
        beta1 (float): Decay rate of the first moment.
        beta2 (float): Decay rate of the second moment.
        eps (float): Term added to the denominator.
        step (int): Step number, starting at 1.
        mode (int): 1 for decoupled weight decay, 0 for L2 regularization.
        bias_correction (int): If not 0, correct both moments for the initialization with zeros.
        weight_decay (float): Weight decay coefficient.

    Raises:
        TypeError: if an entry is not a tensor or the flag is not int32.
        ValueError: for tensors that do not match, naming list and index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_adam
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> grad, param = torch.ones(2, 3).unbind()
        >>> lists = [[grad], [param], [torch.zeros(3)], [torch.zeros(3)]]
        >>> multi_tensor_adam(65536, flag, lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
        >>> param
        tensor([0.9000, 0.9000, 0.9000])
    """
    lists = checked_lists("multi_tensor_adam", noop_flag, tensor_lists, _LISTS)
    numbers = lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    _adam("multi_tensor_adam", lists, numbers)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: Scalar,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Scalar,
) -> None:
    """Performs one Adam step on lists of tensors in place, without synchronization.

    Arguments and errors are as for `multi_tensor_adam`, except that `lr` and `step` are 1-element
    tensors and nothing changes if `noop_flag` is not 0. `inv_scale` is a 1-element tensor with the
    reciprocal of the loss scale. As in apex, gradients are multiplied by `inv_scale` in place.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_adam_capturable
        >>> flag, step = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        >>> grad, param = torch.ones(2, 3).unbind()
        >>> lists = [[grad], [param], [torch.zeros(3)], [torch.zeros(3)]]
        >>> lr, inv_scale = torch.tensor(0.1), torch.tensor([0.5])
        >>> multi_tensor_adam_capturable(
        ...     65536, flag, lists, lr, 0.9, 0.999, 1e-8, step, 1, 1, 0.0, inv_scale
        ... )
        >>> param, grad
        (tensor([0.9000, 0.9000, 0.9000]), tensor([0.5000, 0.5000, 0.5000]))
    """
    function = "multi_tensor_adam_capturable"
    lists = checked_lists(function, noop_flag, tensor_lists, _LISTS)
    numbers = lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    _scaled_adam(function, noop_flag, lists, numbers, inv_scale)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: Scalar,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Scalar,
) -> None:
    """Performs one Adam step on fp32 masters and copies the rounded masters to the parameters.

    Arguments and errors are as for `multi_tensor_adam_capturable`, except that `tensor_lists` has a
    fifth list, the masters.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_adam_capturable_master
        >>> flag, step = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        >>> grad, param = torch.ones(2, 3, dtype=torch.bfloat16).unbind()
        >>> lists = [[grad], [param], [torch.zeros(3)], [torch.zeros(3)], [torch.ones(3)]]
        >>> lr, inv_scale = torch.tensor(0.1), torch.tensor([1.0])
        >>> multi_tensor_adam_capturable_master(
        ...     65536, flag, lists, lr, 0.9, 0.999, 1e-8, step, 1, 1, 0.0, inv_scale
        ... )
        >>> param, lists[4][0]
        (tensor([0.8984, 0.8984, 0.8984], dtype=torch.bfloat16), tensor([0.9000, 0.9000, 0.9000]))
    """
    function = "multi_tensor_adam_capturable_master"
    lists = checked_lists(function, noop_flag, tensor_lists, (*_LISTS, "masters"))
    grads, params, exp_avgs, exp_avg_sqs, masters = lists
    check_masters(function, "masters", masters)
    numbers = lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    _scaled_adam(function, noop_flag, [grads, masters, exp_avgs, exp_avg_sqs], numbers, inv_scale)
    copy_unless(noop_flag, params, masters)


def _adam(
    function: str, lists: list[list[Tensor]], numbers: tuple[Any, ...], **scaling: Any
) -> None:
    """Performs a step; `numbers` are apex's arguments after the lists, in apex's order."""
    grads, params, exp_avgs, exp_avg_sqs = lists
    check_wide_states(function, params, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if not params:
        return
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = numbers
    rate = learning_rate(function, lr, params[0].device)
    counts = counts_before(function, step, params)
    options: dict[str, Any] = {
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(eps),
        "weight_decay": float(weight_decay),
        "adam_w_mode": bool(mode),
        "bias_correction": bool(bias_correction),
    }
    fused_adam_(params, grads, exp_avgs, exp_avg_sqs, [], counts, [], **rate, **options, **scaling)


def _scaled_adam(
    function: str,
    noop_flag: Tensor,
    lists: list[list[Tensor]],
    numbers: tuple[Any, ...],
    inv_scale: Scalar,
) -> None:
    """Performs a step unless the flag is set, then unscales the gradients."""
    factor = on_device(function, "inv_scale", inv_scale, noop_flag.device)
    scale = factor.reciprocal()
    _adam(function, lists, numbers, grad_scale=scale, found_inf=as_flag(noop_flag))
    # Unscale after the step, so that the step uses fp32 products rather than rounded gradients.
    unused = torch.zeros_like(factor)
    skipped = noop_flag.reshape(()).ne(0)
    multi_tensor_unscale_(lists[0], unused, factor.masked_fill(skipped, 1.0))


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: Scalar,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: Scalar,
) -> None:
    """Performs one SGD step on lists of tensors in place.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. If not 0, nothing changes.
        tensor_lists (Sequence): Gradients, parameters, momentum buffers, and optionally copies of
            the parameters in another dtype, which are also written. With copies, parameters must be
            fp32.
        weight_decay (float): Weight decay coefficient.
        momentum (float): Momentum factor. With 0, momentum buffers do not change.
        dampening (float): Dampening of the gradient in the momentum.
        lr (float | Tensor): Learning rate.
        nesterov (bool): Use Nesterov momentum.
        first_run (bool): Initialize the momentum buffers with the gradients.
        wd_after_momentum (bool): Add the weight decay after the momentum.
        scale (float | Tensor): Gradient factor, such as the reciprocal of the loss scale. The
            gradients themselves are not modified.

    Raises:
        TypeError: if an entry is not a tensor or the flag is not int32.
        ValueError: for tensors that do not match, naming list and index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_sgd
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> grad, param = torch.ones(2, 3).unbind()
        >>> lists = [[grad], [param], [torch.zeros(3)]]
        >>> multi_tensor_sgd(65536, flag, lists, 0.0, 0.9, 0.0, 0.5, False, True, False, 0.5)
        >>> param
        tensor([0.7500, 0.7500, 0.7500])
    """
    function, names = "multi_tensor_sgd", ("grads", "params", "momentum_buffers")
    lists = checked_lists(function, noop_flag, tensor_lists, names, optional="copies")
    grads, params, buffers, *copies = lists
    check_wide_states(function, params, momentum_buffers=buffers)
    if copies:
        check_masters(function, "params", params)
    if not params:
        return
    device = params[0].device
    options = learning_rate(function, lr, device)
    if isinstance(scale, Tensor) or scale != 1.0:
        options["grad_scale"] = on_device(function, "scale", scale, device).reciprocal()
    fused_sgd_(
        params,
        grads,
        buffers,
        counts_before(function, 1 if first_run else 2, params),
        [],
        momentum=float(momentum),
        dampening=float(dampening),
        weight_decay=float(weight_decay),
        nesterov=bool(nesterov),
        wd_after_momentum=bool(wd_after_momentum),
        found_inf=as_flag(noop_flag),
        **options,
    )
    if copies:
        copy_unless(noop_flag, copies[0], params)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Scalar,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Performs one Adagrad step on lists of tensors in place.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Ignored as in apex: non-finite gradients propagate.
        tensor_lists (Sequence): Gradients, parameters, sums of squared gradients.
        lr (float | Tensor): Learning rate.
        eps (float): Term added to the denominator.
        mode (int): 1 for decoupled weight decay, 0 for L2 regularization.
        weight_decay (float): Weight decay coefficient.

    Raises:
        TypeError: if an entry is not a tensor or the flag is not int32.
        ValueError: for tensors that do not match, naming list and index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_adagrad
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> grad, param = torch.ones(2, 3).unbind()
        >>> sums = torch.zeros(3)
        >>> multi_tensor_adagrad(65536, flag, [[grad], [param], [sums]], 0.5, 1e-10, 0, 0.0)
        >>> param, sums
        (tensor([0.5000, 0.5000, 0.5000]), tensor([1., 1., 1.]))
    """
    function = "multi_tensor_adagrad"
    lists = checked_lists(function, noop_flag, tensor_lists, ("grads", "params", "sums"))
    grads, params, sums = lists
    check_wide_states(function, params, sums=sums)
    if not params:
        return
    fused_adagrad_(
        params,
        grads,
        sums,
        counts_before(function, 1, params),
        [],
        lr_decay=0.0,
        eps=float(eps),
        weight_decay=float(weight_decay),
        adagrad_w_mode=bool(mode),
        **learning_rate(function, lr, params[0].device),
    )


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """Performs one NovoGrad step on lists of tensors in place.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Ignored as in apex: non-finite gradients propagate.
        tensor_lists (Sequence): Gradients, parameters, moments; fp32, fp16 or bf16.
        grad_norms (Tensor): Running norms of the T gradients, fp32 of shape ``[T]``, updated in
            place. As in apex, no step initializes the norms. Pass the first gradients' norms or
            zeros to the first step.
        lr (float | Tensor): Learning rate.
        beta1 (float): Decay rate of the moment.
        beta2 (float): Decay rate of the norm.
        eps (float): Term added to the denominator.
        step (int): Step number, starting at 1.
        bias_correction (int): If not 0, correct moment and norm for the initialization with zeros.
        weight_decay (float): Weight decay coefficient.
        grad_averaging (int): If not 0, the gradient enters the moment with weight 1 - beta1,
            otherwise with weight 1.
        moment_mode (int): 0 normalizes gradients and adds weight decay before the moment, 1 after
            the moment.
        norm_type (int): 2 for the L2 norm, 0 for the maximum magnitude.

    Raises:
        TypeError: if an entry is not a tensor, or a tensor's dtype differs from the list above.
        ValueError: for tensors that do not match, naming list and index, and for an unknown
            `norm_type`.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_novograd
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> grad, param, norms = torch.tensor([3.0, -4.0]), torch.ones(2), torch.tensor([5.0])
        >>> lists = [[grad], [param], [torch.zeros(2)]]
        >>> multi_tensor_novograd(
        ...     65536, flag, lists, norms, 0.5, 0.95, 0.98, 1e-8, 1, 0, 0.0, 0, 0, 2
        ... )
        >>> param
        tensor([0.7000, 1.4000])
    """
    function = "multi_tensor_novograd"
    lists = checked_lists(function, noop_flag, tensor_lists, ("grads", "params", "exp_avgs"))
    grads, params, exp_avgs = lists
    check_vector(function, "grad_norms", grad_norms, params)
    for index, param in enumerate(params):
        if param.dtype == torch.float64:
            raise ValueError(
                f"{function}: expected params[{index}] to be fp32, fp16 or bf16 because grad_norms "
                f"is fp32, got {param.dtype}. Use torchfuse.optimizers.FusedNovoGrad."
            )
    check_wide_states(function, params, exp_avgs=exp_avgs)
    if norm_type not in (0, 2):
        raise ValueError(
            f"{function}: expected norm_type to be 2, or 0 for the largest magnitude, "
            f"got {norm_type}."
        )
    if not params:
        return
    torch.ops.torchfuse.fused_novograd_(
        params,
        grads,
        exp_avgs,
        grad_norms.unbind(),
        counts_before(function, step, params),
        [],
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(weight_decay),
        eps=float(eps),
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        reg_inside_moment=moment_mode == 0,
        inf_norm=norm_type == 0,
        init_zero=True,  # the first step blends norms like every step
        **learning_rate(function, lr, params[0].device),
    )
