# SPDX-License-Identifier: BSD-3-Clause
"""LAMB with fp32 masters, with apex's name and signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchfuse.optimizers.fused_lamb import FusedLAMB
from torchfuse.optimizers.hyper_params import positional_remedy
from torchfuse.optimizers.options import HALF_DTYPES, MasterOptions


class FusedMixedPrecisionLamb(FusedLAMB):
    r"""LAMB with fp32 masters of 16-bit parameters, as apex.optimizers.FusedMixedPrecisionLamb.

    The formula and the other arguments are those of :class:`FusedLAMB`, in apex's order.

    Args:
        step: number of steps that were made before; bias correction and `ema_start_step` continue
            from it.
        reduced_precision_dtype: torch.float16 or torch.bfloat16: 16-bit parameters have fp32
            masters. None: they have no masters.
        **options: options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: for a value out of range or an unsupported parameter, naming the group.
        TypeError: for a value of the wrong type, naming the group.
        RuntimeError: if `amsgrad` is True.

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
        Differences from apex's class: masters are saved in checkpoints; closures run with gradients
        enabled; a step after `scaler.unscale_` does not unscale again; groups may differ in dtype.
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
        **options: Unpack[MasterOptions],
    ) -> None:
        name = type(self).__name__
        of_defaults: dict[str, Any] = {**options}
        step = of_defaults.pop("initial_step", step)  # of another optimizer's defaults
        options = cast(MasterOptions, of_defaults)
        _check_reduced_dtype(name, reduced_precision_dtype)
        _check_first_step(f"{name}: expected step to be", step, positional_remedy("step", step))
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
        # Stored in the groups, so that copies and checkpoints have them.
        own = {"initial_step": step, "reduced_precision_dtype": reduced_precision_dtype}
        for settings in (self.defaults, *self.param_groups):
            settings.update(own)

    @overload
    def step(self, closure: None = None, **scaler: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **scaler: Any) -> float: ...

    # `grad_scaler` is not in the signature: torch's scaler would pass itself to that parameter.
    def step(self, closure: Callable[[], float] | None = None, **scaler: Any) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: called first, with gradients enabled; its value is returned.
            **scaler: `grad_scaler`, the gradient scaler that has scaled the loss:
                `optimizer.step(grad_scaler=scaler)` calls `scaler.step(optimizer)`.

        Raises:
            RuntimeError: for a closure with a gradient scaler, or tensors that no longer match.
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

    def _check_settings(self, index: int, group: dict[str, Any], in_step: bool = False) -> None:
        super()._check_settings(index, group, in_step)
        where = f"{self._caller(in_step)}: expected initial_step of group {index} to be"
        # The constructor stores it when it has added the groups.
        _check_first_step(
            where, group.get("initial_step", 0), "Set it to the number of steps made."
        )

    def _normalize_group(self, group: dict[str, Any]) -> None:
        super()._normalize_group(group)
        group.setdefault("initial_step", 0)  # of another class, whose states have their counts

    def _create_state(self, param: Tensor, group: dict[str, Any]) -> None:
        super()._create_state(param, group)
        if group["initial_step"]:
            first = torch.tensor(float(group["initial_step"]), dtype=torch.float32, device="cpu")
            self.state[param].setdefault("step", first)

    @property
    def reduced_precision_dtype(self) -> torch.dtype | None:
        """The constructor argument, as stored in the first group."""
        dtype: torch.dtype | None = self.param_groups[0]["reduced_precision_dtype"]
        return dtype

    @property
    def param_groups_full_precision(self) -> list[dict[str, Any]]:
        """The parameter groups, with masters instead of the parameters that have one."""
        masters = self.param_groups_master or [{}] * len(self.param_groups)
        return [
            {**group, "params": list(group["params"]), **updated}
            for group, updated in zip(self.param_groups, masters, strict=True)
        ]


def _check_first_step(expected: str, step: Any, remedy: str) -> None:
    if not isinstance(step, int):
        raise TypeError(f"{expected} an int of at least 0, got {step!r}. {remedy}")
    # Counts are stored in fp32.
    if not 0 <= step <= torch.finfo(torch.float32).max:
        raise ValueError(f"{expected} an int of at least 0, got {step!r}.")


def _check_reduced_dtype(owner: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in HALF_DTYPES:
        raise ValueError(
            f"{owner}: expected reduced_precision_dtype to be None, torch.float16 or "
            f"torch.bfloat16, got {dtype}."
        )
