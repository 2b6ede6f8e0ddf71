# SPDX-License-Identifier: BSD-3-Clause
"""Functions with the calling convention of apex's native module, based on torchfuse's ops."""

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
    """Performs one Adam step on lists of tensors in place, as apex's function of the same name.

    Args:
        chunk_size: ignored; the kernels choose their own.
        noop_flag: 1-element tensor of any dtype; if it is not 0, nothing changes.
        tensor_lists: gradients, parameters, first moments, second moments; see
            `torchfuse.ops.fused_adam_` for their dtypes.
        lr: learning rate.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the denominator.
        step: number of this step, starting at 1.
        mode: 1 for decoupled weight decay, 0 for L2 regularization.
        bias_correction: if not 0, correct both moments for their initialization at zero.
        weight_decay: weight decay coefficient.

    Raises:
        ValueError: if the number of lists is not four.
        RuntimeError: for tensors that do not match; nothing has been changed then.
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
    # The op increments the counts itself; each needs a separate element.
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
