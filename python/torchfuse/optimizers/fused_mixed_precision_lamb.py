# SPDX-License-Identifier: BSD-3-Clause
"""LAMB with fp32 masters, under the name and signature that apex gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from torchfuse.optimizers._checks import HALF_DTYPES
from torchfuse.optimizers._hyper_params import positional_remedy
from torchfuse.optimizers._options import BasicOptions
from torchfuse.optimizers.fused_lamb import FusedLAMB

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FusedMixedPrecisionLamb(FusedLAMB):
    r"""LAMB as apex.optimizers.FusedMixedPrecisionLamb: 16-bit parameters with fp32 masters.

    The formula is that of :class:`FusedLAMB`.

    Args:
        params: parameters or parameter groups, dense, of fp32, fp16, bf16 or fp64.
        lr: learning rate, a number or a 0-dim fp32 or fp64 tensor.
        step: steps that were made before; bias correction goes on from there.
        bias_correction: as in FusedLAMB.
        betas: as in FusedLAMB.
        eps: as in FusedLAMB.
        weight_decay: as in FusedLAMB.
        amsgrad: must be False.
        adam_w_mode: as in FusedLAMB.
        grad_averaging: as in FusedLAMB.
        max_grad_norm: as in FusedLAMB.
        use_nvlamb: as in FusedLAMB.
        reduced_precision_dtype: torch.float16 or torch.bfloat16: 16-bit parameters have fp32
            masters. None: they have not.
        set_grad_none: as in FusedLAMB.
        maximize: ascend instead of descend.
        trust_ratio_bounds: as in FusedLAMB.
        exp_avg_dtype: as in FusedLAMB.
        exp_avg_sq_dtype: as in FusedLAMB.
        **options: those of every fused optimizer.

    Raises:
        ValueError: for a value out of range or an unsuitable parameter, naming the group.
        TypeError: for a value of another type, naming the group.
        RuntimeError: for `amsgrad`.

    Example:
        >>> import torch
        >>> from torchfuse.optimizers import FusedMixedPrecisionLamb
        >>> param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        >>> optimizer = FusedMixedPrecisionLamb([param], reduced_precision_dtype=torch.bfloat16)
        >>> param.grad = torch.ones(4, dtype=torch.bfloat16)
        >>> optimizer.step()
        >>> optimizer.param_groups_full_precision[0]["params"][0]
        tensor([0.9990, 0.9990, 0.9990, 0.9990])

    Notes:
        Differences from apex's: masters are saved in the checkpoint; closures run with gradients
        enabled; a step after `scaler.unscale_` unscales nothing; groups may differ in dtype.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-6,
        weight_decay: float | Tensor = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
        *,
        set_grad_none: bool = True,
        maximize: bool = False,
        trust_ratio_bounds: tuple[float, float] | None = None,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        **options: Unpack[BasicOptions],
    ) -> None:
        name = type(self).__name__
        if reduced_precision_dtype is not None and reduced_precision_dtype not in HALF_DTYPES:
            raise ValueError(
                f"{name}: expected reduced_precision_dtype to be None, torch.float16 or "
                f"torch.bfloat16, got {reduced_precision_dtype}."
            )
        if not isinstance(step, int):
            raise TypeError(
                f"{name}: expected step to be an int of at least 0, got {step!r}. "
                f"{positional_remedy('step', step)}"
            )
        if step < 0:
            raise ValueError(f"{name}: expected step to be an int of at least 0, got {step!r}.")
        options.setdefault("master_weights", reduced_precision_dtype is not None)
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            set_grad_none=set_grad_none,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
            maximize=maximize,
            trust_ratio_bounds=trust_ratio_bounds,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            **options,
        )
        # In the groups, so that copies and checkpoints have them.
        own = {"initial_step": step, "reduced_precision_dtype": reduced_precision_dtype}
        for settings in (self.defaults, *self.param_groups):
            settings.update(own)

    @overload
    def step(self, closure: None = None, **scaler: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **scaler: Any) -> float: ...

    # The scaler is not spelled out: torch's would pass itself to a parameter of that name.
    def step(self, closure: Callable[[], float] | None = None, **scaler: Any) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: called first, with gradients enabled; its value is returned.
            **scaler: `grad_scaler`, the gradient scaler whose scale the gradients carry:
                `optimizer.step(grad_scaler=scaler)` is `scaler.step(optimizer)`.

        Raises:
            RuntimeError: as for every fused optimizer, and for a closure with a scaler.
        """
        grad_scaler = scaler.pop("grad_scaler", None)
        if scaler:
            raise TypeError(
                f"{type(self).__name__}.step: expected closure and grad_scaler, "
                f"got {sorted(scaler)}."
            )
        if grad_scaler is None:
            return super().step(closure)
        if closure is not None:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        result: float | None = grad_scaler.step(self)
        return result

    def _create_state(self, param: Tensor, group: dict[str, Any]) -> None:
        super()._create_state(param, group)
        if group["initial_step"]:
            first = torch.tensor(float(group["initial_step"]), dtype=torch.float32, device="cpu")
            self.state[param].setdefault("step", first)

    @property
    def reduced_precision_dtype(self) -> torch.dtype | None:
        """The constructor's argument; without effect afterwards."""
        dtype: torch.dtype | None = self.param_groups[0]["reduced_precision_dtype"]
        return dtype

    @property
    def param_groups_full_precision(self) -> list[dict[str, Any]]:
        """The groups with the masters in the place of parameters that have one."""
        masters = self.param_groups_master or [{}] * len(self.param_groups)
        return [
            {**group, "params": list(group["params"]), **updated}
            for group, updated in zip(self.param_groups, masters, strict=True)
        ]
