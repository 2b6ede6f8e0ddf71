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

    With :math:`g` the gradient (negated if `maximize`) and :math:`t` the parameter's step count:

    .. math::
        g &\leftarrow g + \lambda p \quad \text{(adagrad_w_mode=False)} \\
        s &\leftarrow s + g^2 \\
        d &= \frac{g}{\sqrt{s} + \epsilon} \\
        d &\leftarrow d + \lambda p \quad \text{(adagrad_w_mode=True)} \\
        p &\leftarrow p - \frac{\gamma}{1 + (t - 1) \eta} d

    Args:
        params (Iterable): Parameters or parameter groups. Parameters are fp32, fp16, bf16 or fp64,
            dense and without gaps in memory.
        lr (float | Tensor, default 1e-2): Learning rate :math:`\gamma`. A tensor has one element
            and a floating dtype.
        eps (float | Tensor, default 1e-10): :math:`\epsilon`, added to the denominator; at least 0.
        weight_decay (float | Tensor, default 0.0): :math:`\lambda`, at least 0.
        set_grad_none (bool, default True): `zero_grad()` sets gradients to None. If False, it fills
            gradients with zeros.
        adagrad_w_mode (bool, default False): Use decoupled weight decay. If False, use L2
            regularization as torch.optim does.
        lr_decay (float | Tensor, default 0.0): Learning rate decay :math:`\eta`, at least 0.
        initial_accumulator_value (float, default 0.0): Initial value of :math:`s`, at least 0.
        maximize (bool, default False): Ascend along the gradient instead of descending.
        **options: Options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: If a value is out of range or a parameter is unsupported. The message names the
            parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.

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
        Differences from torch.optim.Adagrad:

        - Positional arguments are in apex's order.
        - Sums are fp32 for 16-bit parameters. A sum is created with the parameter's first gradient.
        - Any `found_inf` other than 0 skips the step.
        - Complex and sparse tensors are not supported.

        Both classes load each other's checkpoints. `state_dict()` contains an initial state for
        parameters that have not stepped yet, because torch expects one.

        Differences from apex.optimizers.FusedAdagrad: this class also supports the CPU and bf16,
        and counts steps.

        Source: J. Duchi, E. Hazan and Y. Singer, *Adaptive subgradient methods for online learning
        and stochastic optimization*, 2011.
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
        # apex does not count steps. Only lr_decay needs the count, and apex has no lr_decay.
        if "sum" in state:
            state.setdefault("step", 1)

    def _complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch creates every state in the constructor, so torch's class expects a state for each
        # parameter.
        states = state_dict["state"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            saved.update(TORCH_ONLY)
            for param, key in zip(group["params"], saved["params"], strict=True):
                known = param.dtype in PARAM_DTYPES and not (is_lazy(param) or param.is_meta)
                if key not in states and known:
                    fresh = self._begin_state(param, group, "sum")
                    step = torch.zeros((), dtype=torch.float32, device="cpu")
                    states[key] = {"step": step, "sum": fresh}
