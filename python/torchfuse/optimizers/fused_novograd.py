# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad (Ginsburg et al. 2019), in apex's variants."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import CommonOptions, check_no_amsgrad


class FusedNovoGrad(FusedOptimizer):
    r"""NovoGrad: momentum divided by a running norm of each tensor's gradient.

    With :math:`g` the gradient after clipping (negated if `maximize`), :math:`t` the parameter's
    step count and :math:`n` one number per tensor:

    .. math::
        n &\leftarrow \sqrt{\beta_2 n^2 + (1 - \beta_2) \lVert g \rVert_2^2}
            \quad \text{(first step: } n \leftarrow \lVert g \rVert_2 \text{)} \\
        d &= n / \sqrt{1 - \beta_2^t} + \epsilon \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        p &\leftarrow p - \gamma \left( \frac{m / (1 - \beta_1^t)}{d} + \lambda p \right)

    With `reg_inside_moment` the moment averages normalized gradients:

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) (g / d + \lambda p) \\
        p &\leftarrow p - \gamma \, m / (1 - \beta_1^t)

    Args:
        params (Iterable): Parameters or parameter groups. Parameters are fp32, fp16, bf16 or fp64,
            dense and without gaps in memory.
        lr (float | Tensor, default 1e-3): Learning rate :math:`\gamma`. A tensor has one element
            and a floating dtype.
        bias_correction (bool, default True): Divide by the terms in :math:`\beta^t`. If False, the
            terms are 1.
        betas (tuple[float | Tensor, float | Tensor], default (0.9, 0.999)): Decay rates
            :math:`\beta_1` of the moment and :math:`\beta_2` of the norm, in [0, 1).
        eps (float | Tensor, default 1e-8): :math:`\epsilon`, added to the denominator; at least 0.
        weight_decay (float | Tensor, default 0.0): :math:`\lambda`, at least 0.
        amsgrad (bool, default False): Must be False. Accepted because apex has the argument at this
            position.
        reg_inside_moment (bool, default False): Normalize gradients and add the weight decay inside
            the moment.
        grad_averaging (bool, default True): Weight the gradient in the moment by
            :math:`1 - \beta_1`. If False, the weight is 1.
        norm_type (int, default 2): 2 for the L2 norm, or 0 for the largest magnitude, with
            :math:`n \leftarrow \beta_2 n + (1 - \beta_2) \max |g|`.
        init_zero (bool, default False): Start with a norm of 0 and apply the general formula in the
            first step too.
        set_grad_none (bool, default True): `zero_grad()` sets gradients to None. If False, it fills
            gradients with zeros.
        maximize (bool, default False): Ascend along the gradient instead of descending.
        exp_avg_dtype (torch.dtype | None, default None): Storage dtype of `exp_avg`. None:
            `state_dtype`.
        **options: Options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: If a value is out of range or a parameter is unsupported. The message names the
            parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.
        RuntimeError: If `amsgrad` is True or `norm_type` is neither 0 nor 2.

    Example:
        The paper's formula and decay rates:

        >>> import torch
        >>> from torchfuse.optimizers import FusedNovoGrad
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedNovoGrad(
        ...     [param], lr=0.5, betas=(0.95, 0.98), bias_correction=False,
        ...     grad_averaging=False, reg_inside_moment=True,
        ... )
        >>> param.grad = torch.tensor([3.0, -4.0])
        >>> optimizer.step()
        >>> optimizer.state[param]["exp_avg_norm"]
        tensor(5.)
        >>> param.data
        tensor([0.7000, 1.4000])

    Notes:
        The state `exp_avg_norm` is :math:`n` rather than :math:`n^2`, as in apex, because squares
        of large norms exceed fp32's range. `exp_avg_norm` is a 0-dim fp32 tensor (fp64 for fp64
        parameters), independent of `state_dtype`. If the denominator is 0, which requires
        :math:`\epsilon = 0`, only the weight decay changes the tensor.

        With `bias_correction` the first step is about :math:`1 / \sqrt{1 - \beta_2}` times smaller
        than later steps, as in apex, because :math:`n` starts with a full norm. With `init_zero`
        the first step is as large as later steps.

        Differences from apex.optimizers.FusedNovoGrad:

        - The CPU and bf16 are supported. The moment is fp32 for 16-bit parameters.
        - Steps are counted per parameter. Each step may update a different number of parameters.
        - The step never waits for the device.

        `load_state_dict` accepts checkpoints of apex's class.

        Source: B. Ginsburg et al., *Stochastic gradient methods with layer-wise adaptive moments
        for training of deep networks*, 2019.
    """

    _algorithm = "novograd"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-8,
        weight_decay: float | Tensor = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        check_no_amsgrad(type(self).__name__, amsgrad)
        defaults: dict[str, Any] = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "maximize": maximize,
            "exp_avg_dtype": exp_avg_dtype,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none, **options)

    def _hyper_params(
        self, index: int, group: dict[str, Any], in_step: bool = True
    ) -> tuple[Any, ...]:
        with_norm = {**group, "inf_norm": group["norm_type"] == 0}
        return super()._hyper_params(index, with_norm, in_step)

    def _check_settings(self, index: int, group: dict[str, Any], in_step: bool = False) -> None:
        super()._check_settings(index, group, in_step)
        norm_type = group["norm_type"]
        if not isinstance(norm_type, Real) or norm_type not in (0, 2):
            raise RuntimeError(
                f"{self._caller(in_step)}: expected norm_type of group {index} to be 2, or 0 for "
                f"the largest magnitude, got {norm_type!r}."
            )

    def _normalize_checkpoint(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        groups = state_dict["param_groups"]
        if not any("exp_avg_sq" in group for group in groups):
            return state_dict
        states = dict(state_dict["state"])
        for index, group in enumerate(groups):
            where = f"{type(self).__name__}.load_state_dict: expected 'exp_avg_sq' of group {index}"
            _give_out_norms(where, group, states)
        kept = [{k: v for k, v in group.items() if k != "exp_avg_sq"} for group in groups]
        return {**state_dict, "state": states, "param_groups": kept}


def _give_out_norms(where: str, group: Mapping[str, Any], states: dict[Any, Any]) -> None:
    """Assigns the norms of an apex group to the group's parameters.

    apex stores one vector for fp16 and one for fp32 parameters. A vector contains one norm per
    parameter that had a gradient, in order. Such a parameter has a moment of the same dtype.
    """
    halves: list[Any] = []
    others: list[Any] = []
    for key in group["params"]:
        state = states.get(key)
        moment = state.get("exp_avg") if isinstance(state, Mapping) else None
        if isinstance(moment, Tensor):
            (halves if moment.dtype == torch.float16 else others).append(key)
    vectors = group.get("exp_avg_sq", (None, None))
    if not isinstance(vectors, tuple | list) or len(vectors) != 2:
        raise ValueError(f"{where} to be a pair of tensors, got {type(vectors).__name__}.")
    for keys, vector, dtype in zip((halves, others), vectors, ("fp16", "fp32"), strict=True):
        if not isinstance(vector, Tensor):
            vector = torch.tensor(vector or [], dtype=torch.float64, device="cpu")
        norms = list(vector.reshape(-1))
        if len(norms) != len(keys):
            raise ValueError(
                f"{where} to hold {len(keys)} norms for its {dtype} parameters with a moment, got "
                f"{len(norms)}. The checkpoint belongs to other parameters."
            )
        for key, norm in zip(keys, norms, strict=True):
            states[key] = {**states[key], "exp_avg_norm": norm}
