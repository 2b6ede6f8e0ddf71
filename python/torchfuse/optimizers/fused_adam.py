# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019), AMSGrad (Reddi et al. 2018)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import TORCH_ONLY, BasicOptions, decoupled_option

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FusedAdam(FusedOptimizer):
    r"""Adam and AdamW in one pass over all parameters, with unscaling and clipping inside the step.

    With :math:`g` the gradient (negated under `maximize`) and :math:`t` the parameter's step count:

    .. math::
        g &\leftarrow g + \lambda p \quad \text{(adam_w_mode=False)} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \gamma \lambda p \quad \text{(adam_w_mode=True)} \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t}
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    With `amsgrad`, the running maximum of :math:`v` replaces :math:`v` in the last line.

    Args:
        params: parameters or parameter groups, without gaps in memory, of fp32, fp16, bf16 or
            fp64; also `named_parameters()`.
        lr: learning rate :math:`\gamma`, a number or a 1-element float tensor.
        bias_correction: divide by the terms in :math:`\beta^t`; otherwise they are 1.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the denominator.
        adam_w_mode: use decoupled weight decay (AdamW); otherwise L2 regularization (Adam).
        weight_decay: :math:`\lambda`. The default is 0, as in apex; torch's AdamW has 0.01.
        amsgrad: use the running maximum of the second moment.
        set_grad_none: `zero_grad()` sets gradients to None instead of filling them with zeros.
        capturable: keep `lr` as a tensor on the device, which a captured CUDA graph reads in every
            replay, as in apex. See `make_capturable()` for other hyper-parameters.
        master_weights: keep an fp32 master of every fp16 and bf16 parameter in
            `state["master_param"]`; the step updates the master and rounds it to the parameter. It
            is created from the parameter in the parameter's first step.
        max_grad_norm: clip the norm of the unscaled gradients over all groups, inside the step, as
            `torch.nn.utils.clip_grad_norm_` does. `math.inf` only measures it. None: no clipping.
        maximize: gradient ascent instead of descent.
        write_back_grads: store gradients in `.grad`. "unscaled": without the loss scale, also in a
            step that is skipped, as torch's scaler leaves them; this takes a pass over the
            gradients. "clipped" or True: unscaled and clipped, unless the step is skipped. Nothing
            is stored where there is no scale to take off and no norm to clip to. False or None:
            gradients are never modified.
        skip_non_finite: skip a step with a non-finite gradient element even without a scaler.
        skip_norm_above: skip a step whose norm of all unscaled gradients is greater, on the device,
            as a step with non-finite gradients is skipped. A number, or a tensor of one element,
            such as a running statistic of norms, which every step reads and checkpoints do not
            hold. The step is no overflow: the loss scale does not change. A NaN norm skips nothing.
            None: no step is skipped.
        state_dtype: dtype of the moments: fp32, bf16 or fp16; fp64 for fp64 parameters. None: fp32
            for 16-bit parameters, else the parameter's dtype. Moments are computed in fp32 (fp64)
            and rounded when they are stored.
        exp_avg_dtype: dtype of `exp_avg`, as in TransformerEngine. None: `state_dtype`.
        exp_avg_sq_dtype: dtype of `exp_avg_sq` and `max_exp_avg_sq`. None: `state_dtype`.
        store_param_remainders: store only the 16 bits of a bf16 parameter's master that the
            parameter lacks, in `state["param_remainder"]` (int16): half the memory, and the same
            masters bit for bit. The parameter is the master rounded to nearest, with ties away from
            zero instead of to even. Requires `master_weights` and bf16 parameters; it does not
            affect fp32 parameters of the group. As in TransformerEngine.
        master_weight_dtype: must be torch.float32, the dtype of all masters; accepted for programs
            written for TransformerEngine.
        stochastic_rounding: round new values of bf16 parameters at random to one of the two
            neighboring bf16 numbers, without bias, for training without masters. Requires bf16
            parameters and `master_weights=False`. See Numerics in the documentation.
        seed: seed of stochastic rounding, at least 0. The random bits depend only on the seed, the
            parameter's position among all groups, its step count and the element in the whole
            parameter: runs are reproducible after a checkpoint, for any number of threads and of
            processes that a DTensor is split over, and on both CPU and CUDA.
        ema_decay: decay of exponential moving averages of the parameters, in [0, 1): the step adds
            :math:`\bar p \leftarrow \bar p + (1 - d)(p - \bar p)`, in the pass that writes
            :math:`p`. The average is `state["ema_param"]`, fp32 for 16-bit parameters (fp64 for
            fp64), and is moved by the new :math:`p` before it is rounded: the master's. It begins
            as a copy of the parameter before its first step. See ``ema_weights()``. None: no
            averages.
        ema_warmup: begin with a smaller decay, at most (1 + n) / (10 + n) in the average's n-th
            step.
        ema_start_step: until the parameter's step count has passed this number, the average is a
            copy of the parameter. With 1 it is the average of `torch.optim.swa_utils`.
        norm_groups: process groups, or device meshes of one dimension, whose processes step other
            parameters of one model, as the stages of a pipeline do. Norm, clipping and the decision
            to skip a step are then those of all gradients. All processes give groups in the same
            order and the same `max_grad_norm`, and make the same steps and calls of a scaler, which
            has to be torchfuse's, with gradients or without. A parameter that several of them have
            counts as often. Not part of checkpoints.
        fused, foreach, differentiable: False or None, for programs written for torch: this class
            is always fused, and the step has no derivative.

    Raises:
        ValueError: for a value out of range or an unsupported parameter, naming the group.
        TypeError: for a value of the wrong type, naming the group.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedAdam
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.01, max_grad_norm=1.0)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> int(optimizer.state[model.weight]["step"])
        1

    Notes:
        Differences from torch.optim.Adam and AdamW: moments are fp32 for 16-bit parameters;
        clipping and unscaling take no separate pass; the step never waits for the device; any
        `found_inf` other than 0 skips the step; complex and sparse tensors are rejected.
        Checkpoints can be exchanged in both directions.

        Differences from apex.optimizers.FusedAdam: it also runs on the CPU; steps are counted per
        parameter; `amsgrad`, bf16 masters, groups added later and any dense layout work; masters
        are saved; gradients are not overwritten; a step after `scaler.unscale_` does not unscale
        again.
    """

    _algorithm = "adam"

    adam_w_mode: int = decoupled_option("adam_w_mode")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float | Tensor = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        **options: Unpack[BasicOptions],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "adam_w_mode": adam_w_mode,
            "capturable": capturable,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
        }
        super().__init__(
            params,
            defaults,
            set_grad_none=set_grad_none,
            master_weights=master_weights,
            max_grad_norm=max_grad_norm,
            **options,
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        if group["amsgrad"]:
            return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return ("exp_avg", "exp_avg_sq")

    def _normalize_group(self, group: dict[str, Any]) -> None:
        super()._normalize_group(group)
        # torch's key has priority: torch.optim.AdamW keeps an old `adam_w_mode`, but sets its own.
        decoupled = group.pop("decoupled_weight_decay", None)
        if decoupled is not None:
            group["adam_w_mode"] = bool(decoupled)

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            decoupled = bool(group["adam_w_mode"])
            group.update(TORCH_ONLY, capturable=False, decoupled_weight_decay=decoupled)

    @property
    def capturable(self) -> bool:
        """The option `capturable` of the first group; setting it changes all groups."""
        return bool(self.param_groups[0]["capturable"])

    @capturable.setter
    def capturable(self, value: bool) -> None:
        for group in self.param_groups:
            group["capturable"] = bool(value)
            self._make_lr_capturable(group)
