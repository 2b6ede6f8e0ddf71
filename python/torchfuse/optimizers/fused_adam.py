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

    With :math:`g` the gradient (negated if `maximize`) and :math:`t` the parameter's step count:

    .. math::
        g &\leftarrow g + \lambda p \quad \text{(adam_w_mode=False)} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \gamma \lambda p \quad \text{(adam_w_mode=True)} \\
        p &\leftarrow p - \frac{\gamma}{1 - \beta_1^t}
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    With `amsgrad`, the running maximum of :math:`v` replaces :math:`v` in the last line.

    Args:
        params (Iterable): Parameters, parameter groups or `named_parameters()`. Parameters are
            fp32, fp16, bf16 or fp64, dense and without gaps in memory.
        lr (float | Tensor, default 1e-3): Learning rate :math:`\gamma`. A tensor has one element
            and a floating dtype.
        bias_correction (bool, default True): Divide by the terms in :math:`\beta^t`. If False, the
            terms are 1.
        betas (tuple[float | Tensor, float | Tensor], default (0.9, 0.999)): Decay rates
            :math:`\beta_1` and :math:`\beta_2` of the moments, in [0, 1).
        eps (float | Tensor, default 1e-8): :math:`\epsilon`, added to the denominator; at least 0.
        adam_w_mode (bool, default True): Use decoupled weight decay (AdamW). If False, use L2
            regularization (Adam).
        weight_decay (float | Tensor, default 0.0): :math:`\lambda`, at least 0. apex has the same
            default; torch's AdamW has 0.01.
        amsgrad (bool, default False): Use the running maximum of the second moment.
        set_grad_none (bool, default True): `zero_grad()` sets gradients to None. If False, it fills
            gradients with zeros.
        capturable (bool, default False): Store `lr` as a tensor on the device, as apex does. A
            captured CUDA graph reads the tensor in every replay. See `make_capturable()` for other
            hyper-parameters.
        master_weights (bool, default False): Keep an fp32 master of every fp16 and bf16 parameter
            in `state["master_param"]`. The step updates the master and rounds the result to the
            parameter. A parameter's first step creates its master.
        max_grad_norm (float | None, default None): Maximum norm of the unscaled gradients over all
            groups. The step clips as `torch.nn.utils.clip_grad_norm_` does. `math.inf` measures
            the norm without clipping. None disables clipping.
        maximize (bool, default False): Ascend along the gradient instead of descending.
        write_back_grads (bool | str | None, default None): What a step stores in `.grad` when it
            unscales or clips. False or None: nothing. "clipped" or True: unscaled and clipped
            gradients, unless the step is skipped. "unscaled": unscaled gradients, even if the step
            is skipped, as torch's scaler does; costs one more pass over the gradients.
        skip_non_finite (bool, default False): Skip a step with a non-finite gradient element even
            without a scaler.
        skip_norm_above (float | Tensor | None, default None): Skip a step on the device if the norm
            of all unscaled gradients is greater. A 1-element tensor, such as a running statistic,
            is read in every step and is not saved in checkpoints. Such a skip is not an overflow,
            so the loss scale does not change. A NaN norm does not skip the step. None disables the
            check.
        state_dtype (torch.dtype | None, default None): Storage dtype of the moments: fp32, bf16 or
            fp16, or fp64 for fp64 parameters. Arithmetic is always in fp32 (fp64). None: fp32 for
            16-bit parameters, otherwise the parameter's dtype.
        exp_avg_dtype (torch.dtype | None, default None): Storage dtype of `exp_avg`, as in
            TransformerEngine. None: `state_dtype`.
        exp_avg_sq_dtype (torch.dtype | None, default None): Storage dtype of `exp_avg_sq` and
            `max_exp_avg_sq`. None: `state_dtype`.
        store_param_remainders (bool, default False): Store only the lower 16 bits of a bf16
            parameter's master, in `state["param_remainder"]` (int16), as TransformerEngine does.
            Masters take half the memory and keep every bit. The parameter is its master rounded to
            nearest, with ties away from zero instead of to even. Requires `master_weights` and
            bf16 parameters. fp32 parameters in the group are not affected.
        master_weight_dtype (torch.dtype, default torch.float32): Must be torch.float32, the dtype
            of all masters. Accepted for programs written for TransformerEngine.
        stochastic_rounding (bool, default False): Round new values of bf16 parameters at random to
            one of the two neighboring bf16 numbers, without bias, to train without masters.
            Requires bf16 parameters and `master_weights=False`. See Numerics in the documentation.
        seed (int, default 0): Seed of stochastic rounding, at least 0. The random bits depend only
            on the seed, the parameter's position among all groups, the step count and the
            element's index in the full (unsharded) parameter. So runs are reproducible after a
            checkpoint, on CPU and CUDA, with any number of threads and any supported DTensor
            sharding.
        ema_decay (float | None, default None): Decay :math:`d` of the parameters' exponential
            moving averages, in [0, 1). The step computes
            :math:`\bar p \leftarrow \bar p + (1 - d)(p - \bar p)` in the pass that writes
            :math:`p`, with :math:`p` before rounding to 16 bits. The average is stored in
            `state["ema_param"]`, in fp32 (fp64 for fp64 parameters). Its initial value is the
            parameter before the first step. See ``ema_weights()``. None disables averages.
        ema_warmup (bool, default False): Limit the decay to (1 + n) / (10 + n) in the average's
            n-th step.
        ema_start_step (int, default 0): The average remains a copy of the parameter until the
            parameter's step count exceeds this number. With 1, averages equal
            `torch.optim.swa_utils`.
        norm_groups (Sequence | None, default None): Process groups, or 1-dimensional device meshes,
            whose processes step other parameters of the same model, such as pipeline stages. The
            norm, clipping and skipping then depend on the gradients of all these processes. Every
            process must pass the groups in the same order and the same `max_grad_norm`. Every
            process must take the same steps and make the same scaler calls, even without
            gradients; the scaler must be torchfuse's. A parameter in k processes contributes k
            times to the norm. Norm groups are not saved in checkpoints.
        fused, foreach, differentiable (bool | None): Must be False or None. Accepted for programs
            written for torch; the step is always fused and has no derivative.

    Raises:
        ValueError: If a value is out of range or a parameter is unsupported. The message names the
            parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.

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
        Differences from torch.optim.Adam and AdamW:

        - Moments are fp32 for 16-bit parameters.
        - Clipping and unscaling need no separate pass, and the step never waits for the device.
        - Any `found_inf` other than 0 skips the step.
        - Complex and sparse tensors are not supported.

        Checkpoints can be exchanged with torch's classes in both directions.

        Differences from apex.optimizers.FusedAdam:

        - The CPU, `amsgrad`, bf16 masters, groups added later and every dense layout are supported.
        - Steps are counted per parameter.
        - Checkpoints contain the masters.
        - The step does not overwrite gradients, and does not unscale again after `scaler.unscale_`.

        Sources: D. Kingma and J. Ba, *Adam: a method for stochastic optimization*, 2015;
        I. Loshchilov and F. Hutter, *Decoupled weight decay regularization*, 2019; S. Reddi,
        S. Kale and S. Kumar, *On the convergence of Adam and beyond*, 2018 (AMSGrad).
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
        # torch.optim.AdamW sets `decoupled_weight_decay` and may keep an outdated `adam_w_mode`.
        decoupled = group.pop("decoupled_weight_decay", None)
        if decoupled is not None:
            group["adam_w_mode"] = bool(decoupled)

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            decoupled = bool(group["adam_w_mode"])
            group.update(TORCH_ONLY, capturable=False, decoupled_weight_decay=decoupled)

    @property
    def capturable(self) -> bool:
        """`capturable` (bool) of the first group. Setting the property changes all groups."""
        return bool(self.param_groups[0]["capturable"])

    @capturable.setter
    def capturable(self, value: bool) -> None:
        for group in self.param_groups:
            group["capturable"] = bool(value)
            self._make_lr_capturable(group)
