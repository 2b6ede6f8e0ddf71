# SPDX-License-Identifier: BSD-3-Clause
"""Modules that wait for their parameters themselves: which parameters these are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchfuse.parallel._sharded_checks import NAME


class GatherUnits:
    """Modules in whose forward passes gathers end.

    Args:
        modules: what a program has given, or None for none.
        params: of the optimizer.

    Raises:
        TypeError: if it is no list of modules.
        ValueError: for a module without a forward pass or parameters of the optimizer.
    """

    def __init__(self, modules: Any, params: Sequence[Tensor]) -> None:
        self.modules: list[nn.Module] = []
        self.members: list[list[int]] = []
        if modules is None:
            return
        if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
            raise TypeError(
                f"{NAME}: expected gather_in_forward to be a list of modules, got one "
                f"{type(modules).__name__}. List the blocks of the model, in the order in which "
                "they run."
            )
        indices = {param: index for index, param in enumerate(params)}
        for place, module in enumerate(modules):
            where = f"{NAME}: expected gather_in_forward[{place}]"
            if not isinstance(module, nn.Module):
                raise TypeError(f"{where} to be a module, got {type(module).__name__}.")
            if type(module).forward is nn.Module.forward:
                raise ValueError(
                    f"{where} to have a forward pass, which waits for its parameters, got a "
                    f"{type(module).__name__}. List the modules inside of it."
                )
            of_module = [indices[param] for param in module.parameters() if param in indices]
            if not of_module:
                raise ValueError(
                    f"{where} to have parameters of the optimizer, got a "
                    f"{type(module).__name__} without. Leave it out."
                )
            self.modules.append(module)
            self.members.append(of_module)

    def described(self) -> list[str]:
        """What all processes must have alike."""
        return [f"gather_in_forward over parameters {self.members}"] if self.modules else []

    def flats(self, params: Sequence[Tensor]) -> list[list[int]] | None:
        """The parameters of each flat tensor, where gradients are whole; None: as without units."""
        if not self.modules:
            return None
        taken: dict[int, int] = {}
        for unit, of_unit in enumerate(self.members):
            for index in of_unit:
                taken.setdefault(index, unit)
        kinds: dict[tuple[int, torch.device, torch.dtype], list[int]] = {}
        for index, param in enumerate(params):
            kind = (taken.get(index, -1), param.device, param.dtype)
            kinds.setdefault(kind, []).append(index)
        return list(kinds.values())
