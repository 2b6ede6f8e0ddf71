# SPDX-License-Identifier: BSD-3-Clause
"""LAMB with fp32 masters, under apex's name and signature."""

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
    r"""LAMB with fp32 masters for 16-bit parameters, like apex.optimizers.FusedMixedPrecisionLamb.

    See :class:`FusedLAMB` for the formula and the other arguments. Positional arguments are in
    apex's order.

    Args:
        step (int, default 0): Number of steps taken before. Bias correction and `ema_start_step`
            continue from this count.
        reduced_precision_dtype (torch.dtype | None, default None): With torch.float16 or
            torch.bfloat16, 16-bit parameters have fp32 masters. None disables masters.
        **options: Options of every fused optimizer, documented in :class:`FusedAdam`.

    Raises:
        ValueError: If a value is out of range or a parameter is unsupported. The message names the
            parameter group.
        TypeError: If a value has the wrong type. The message names the parameter group.
        RuntimeError: If `amsgrad` is True.

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
        Differences from apex's class: checkpoints contain the masters. Closures run with gradients
        enabled. A step after `scaler.unscale_` does not unscale again. Groups may differ in dtype.
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
        step = of_defaults.pop("initial_step", step)  # when constructed from another's defaults
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
        # Groups store both settings, so copies and checkpoints contain them.
        own = {"initial_step": step, "reduced_precision_dtype": reduced_precision_dtype}
        for settings in (self.defaults, *self.param_groups):
            settings.update(own)

    @overload
    def step(self, closure: None = None, **scaler: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **scaler: Any) -> float: ...

    # If the signature had `grad_scaler`, torch's scaler would pass itself as that argument.
    def step(self, closure: Callable[[], float] | None = None, **scaler: Any) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure (Callable | None, default None): Function that recomputes and returns the loss.
                It is called first, with gradients enabled.
            **scaler: `grad_scaler`, the scaler that scaled the loss. With this argument the call is
                equivalent to `grad_scaler.step(optimizer)`.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: If a closure is used with a gradient scaler, or a tensor no longer matches
                its parameter.
            TypeError: If another keyword argument is passed.
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
        # The constructor stores initial_step only after it has added the groups.
        _check_first_step(
            where, group.get("initial_step", 0), "Set it to the number of steps made."
        )

    def _normalize_group(self, group: dict[str, Any]) -> None:
        super()._normalize_group(group)
        group.setdefault("initial_step", 0)  # groups of other classes have no such key

    def _create_state(self, param: Tensor, group: dict[str, Any]) -> None:
        super()._create_state(param, group)
        if group["initial_step"]:
            first = torch.tensor(float(group["initial_step"]), dtype=torch.float32, device="cpu")
            self.state[param].setdefault("step", first)

    @property
    def reduced_precision_dtype(self) -> torch.dtype | None:
        """The constructor argument (torch.dtype or None), as stored in the first group."""
        dtype: torch.dtype | None = self.param_groups[0]["reduced_precision_dtype"]
        return dtype

    @property
    def param_groups_full_precision(self) -> list[dict[str, Any]]:
        """Copies of the parameter groups (list of dicts) in which masters replace parameters."""
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
