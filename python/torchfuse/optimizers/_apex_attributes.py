# SPDX-License-Identifier: BSD-3-Clause
"""What programs written for apex read from its optimizers, or rely on when they subclass one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torchfuse.optimizers._masters import master_of


class ApexAttributes(torch.optim.Optimizer):
    """Attributes of apex's optimizers that are the same for all of them.

    Note [Subclasses with a step of their own]
    A step() written for apex takes its gradients as they are: apex's optimizers, unless capturable,
    let the scaler unscale them. It would ignore what a scaler lends to our step, and update with
    scaled gradients. So a class outside of this package that defines step() does not advertise
    that it obeys a scaler, unless it says so itself; both scalers then treat it as any optimizer.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        if "step" in vars(cls) and "_step_supports_amp_scaling" not in vars(cls) and not ours:
            cls._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """A flag that says "do not skip", for the functions that a subclass calls: int32, [1]."""
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        return torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor]]] | None:
        """What the step updates in full precision, group by group, in the order of `params`.

        That is the fp32 master of a 16-bit parameter (a copy, where it is kept as a remainder), and
        any other parameter itself. None before the step that makes the masters, and without them.
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
