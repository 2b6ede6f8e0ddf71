# SPDX-License-Identifier: BSD-3-Clause
"""Functions with the calling convention of apex's native module, over the ops of torchfuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfuse.ops import fused_adam_


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One Adam step on lists of tensors, in place, as apex's function of this name.

    Args:
        chunk_size: accepted; the kernels choose theirs.
        noop_flag: 1 element, any dtype; if not 0, nothing changes.
        tensor_lists: gradients, parameters, first moments, second moments; see
            `torchfuse.ops.fused_adam_` for their dtypes.
        lr: learning rate.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the denominator.
        step: number of this step, from 1.
        mode: 1 for decoupled weight decay, 0 for L2 regularisation.
        bias_correction: not 0: correct both moments for their start at zero.
        weight_decay: weight decay.

    Raises:
        ValueError: for another number of lists.
        RuntimeError: for tensors that do not fit together; nothing has changed.
    """
    if len(tensor_lists) != 4:
        raise ValueError(
            "multi_tensor_adam: expected tensor_lists to be gradients, parameters, first moments "
            f"and second moments, got {len(tensor_lists)} lists."
        )
    grads, params, exp_avgs, exp_avg_sqs = (list(tensors) for tensors in tensor_lists)
    if not params and not grads:
        return
    device = params[0].device if params else noop_flag.device
    # The op advances the counts itself, each in an element of its own.
    steps = torch.full((len(params),), float(step) - 1.0, dtype=torch.float32, device=device)
    fused_adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps.unbind(),
        [],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        adam_w_mode=bool(mode),
        bias_correction=bool(bias_correction),
        found_inf=noop_flag.to(device=device, dtype=torch.float32),
    )
