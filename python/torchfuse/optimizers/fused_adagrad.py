# SPDX-License-Identifier: BSD-3-Clause
"""Adagrad (Duchi, Hazan and Singer 2011)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from typing_extensions import Unpack

from torchfuse import _C
from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.options import TORCH_ONLY, CommonOptions, decoupled_option
from torchfuse.optimizers.state import PARAM_DTYPES


class FusedAdagrad(FusedOptimizer):
    r"""Adagrad in one pass over all parameters, with unscaling and clipping inside the step.

    With :math:`g` the gradient (negated under `maximize`) and :math:`t` the parameter's step count:

    .. math::
        g &\leftarrow g + \lambda p \quad \text{(adagrad_w_mode=False)} \\
        s &\leftarrow s + g^2 \\
        d &= \frac{g}{\sqrt{s} + \epsilon} \\
        d &\leftarrow d + \lambda p \quad \text{(adagrad_w_mode=True)} \\
        p &\leftarrow p - \frac{\gamma}{1 + (t - 1) \eta} d

    Args:
        params: parameters or parameter groups, without gaps in memory, of fp32, fp16, bf16 or fp64.
        lr: learning rate :math:`\gamma`, a number or a 1-element float tensor.
        eps: added to the denominator, at least 0.
        weight_decay: :math:`\lambda`, at least 0.
        set_grad_none: `zero_grad()` sets gradients to None instead of filling them with zeros.
        adagrad_w_mode: use decoupled weight decay; otherwise L2 regularization, as in torch.optim.
        lr_decay: decay :math:`\eta` of the learning rate, at least 0.
        initial_accumulator_value: initial value of :math:`s`, at least 0.
        maximize: gradient ascent instead of descent.
        **options: options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: for a value out of range or an unsupported parameter, naming the group.
        TypeError: for a value of the wrong type, naming the group.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedAdagrad
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdagrad([param], lr=0.5)
        >>> param.grad = torch.tensor([3.0, -4.0])
        >>> optimizer.step()
        >>> optimizer.state[param]["sum"]
        tensor([ 9., 16.])
        >>> param.data
        tensor([0.5000, 1.5000])

    Notes:
        Differences from torch.optim.Adagrad: positional arguments are in apex's order; sums are
        fp32 for 16-bit parameters and created with a parameter's first gradient; any `found_inf`
        other than 0 skips the step; complex and sparse tensors are rejected. Checkpoints can be
        exchanged in both directions: `state_dict()` holds an initial state for parameters that have
        none yet, because torch expects one.

        Differences from apex.optimizers.FusedAdagrad: it also runs on the CPU and with bf16, and
        counts steps.
    """

    _algorithm = "adagrad"

    adagrad_w_mode: int = decoupled_option("adagrad_w_mode")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float | Tensor = 1e-10,
        weight_decay: float | Tensor = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        lr_decay: float | Tensor = 0.0,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "adagrad_w_mode": adagrad_w_mode,
            "maximize": maximize,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none, **options)

    def _begin_state(self, param: Tensor, group: dict[str, Any], name: str) -> Tensor:
        state = super()._begin_state(param, group, name)
        return state.fill_(float(group["initial_accumulator_value"]))

    def _check_settings(self, index: int, group: dict[str, Any], in_step: bool = False) -> None:
        super()._check_settings(index, group, in_step)
        key = "initial_accumulator_value"
        expected = f"{self._caller(in_step)}: expected {key} of group {index} to be"
        _C.check_hyper_param(self._algorithm, "lr", group[key], expected)

    def _normalize_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        # apex does not count steps; the count only matters for lr_decay, which apex does not have.
        if "sum" in state:
            state.setdefault("step", 1)

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Parameters without a state get an initial one, which torch creates in the constructor.
        states = state_dict["state"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            saved.update(TORCH_ONLY)
            for param, key in zip(group["params"], saved["params"], strict=True):
                known = param.dtype in PARAM_DTYPES and not (is_lazy(param) or param.is_meta)
                if key not in states and known:
                    fresh = self._begin_state(param, group, "sum")
                    step = torch.zeros((), dtype=torch.float32, device="cpu")
                    states[key] = {"step": step, "sum": fresh}
