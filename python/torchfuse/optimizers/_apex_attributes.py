# SPDX-License-Identifier: BSD-3-Clause
"""Attributes that programs written for apex read from its optimizers, or need in subclasses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchfuse.optimizers._masters import master_of


class NativeFunction:
    """A function of apex's amp_C that apex's class has as an attribute, for subclasses.

    It is imported when it is read, because `import torchfuse` does not import torchfuse.apex.

    Args:
        name: name in amp_C. None: that of the attribute.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        from torchfuse.apex.native import amp_c

        function: Callable[..., Any] = getattr(amp_c, str(self._name))
        return function


class ApexAttributes(torch.optim.Optimizer):
    """Attributes that all of apex's optimizers have.

    Note [Subclasses with a step of their own]
    A step() written for apex expects unscaled gradients: apex's optimizers, unless capturable, let
    the scaler unscale them. It would ignore the attributes that a scaler sets for a fused step. So
    a class outside of this package that defines step() does not advertise support for a scaler,
    unless it does so itself; both scalers then treat it like any other optimizer.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        if "step" in vars(cls) and "_step_supports_amp_scaling" not in vars(cls) and not ours:
            cls._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """A flag of 0 (do not skip) for functions that a subclass calls: int32, shape [1]."""
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        return torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor]]] | None:
        """The tensors that the step updates in full precision, by group in the order of `params`.

        These are the fp32 masters of 16-bit parameters (copies, if stored as remainders), and all
        other parameters. None without masters, and before the step that creates them.
        """
        masters = [
            [master_of(p, self.state.get(p, {})) for p in group["params"]]
            for group in self.param_groups
        ]
        if all(master is None for group in masters for master in group):
            return None
        return [
            {"params": [p if m is None else m for p, m in zip(group["params"], ms, strict=True)]}
            for group, ms in zip(self.param_groups, masters, strict=True)
        ]
