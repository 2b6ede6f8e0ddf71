# SPDX-License-Identifier: BSD-3-Clause
"""SGD, Adagrad and NovoGrad steps of apex's amp_C.

States may be fp32, fp16 or bf16. For fp64 parameters, states must be fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchfuse._C import fused_adagrad_, fused_sgd_
from torchfuse.apex.native._lists import (
    TensorLists,
    check_masters,
    check_vector,
    check_wide_states,
    checked_lists,
)
from torchfuse.apex.native._scalars import (
    Scalar,
    as_flag,
    copy_unless,
    counts_before,
    learning_rate,
    on_device,
)


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
