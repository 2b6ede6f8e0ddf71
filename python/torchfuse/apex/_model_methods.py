# SPDX-License-Identifier: BSD-3-Clause
"""Masters in an optimizer's parameter groups, and methods that act on the model through them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.distributed import local_part
from torchfuse.parallel import LARC

_SHORT_DTYPES = (torch.float16, torch.bfloat16)


class Masters:
    """fp32 masters that replace a model's 16-bit parameters in an optimizer's parameter groups.

    Subclasses keep the lists.

    Args:
        optimizer: Optimizer of the model.
    """

    if TYPE_CHECKING:

        @property
        def _models(self) -> list[Tensor]:
            """The model's parameters that have masters."""

        @property
        def _masters(self) -> list[Tensor]:
            """The masters, in the order of `_models`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._versions: list[int] = []  # of the model at the last sync
        self._addresses: list[int] = []  # of the model at the last check for overlaps

    @torch.inference_mode(False)  # masters are written in later steps
    @torch.no_grad()
    def _create_masters(
        self, group: dict[str, Any], models: list[Tensor], masters: list[Tensor]
    ) -> None:
        """Creates missing masters of a group's 16-bit parameters, with states in fp32.

        Appends the parameters and their masters to the lists.
        """
        for place, param in enumerate(group["params"]):
            if not param.requires_grad or param.dtype not in _SHORT_DTYPES:
                continue
            master = torch.nn.Parameter(param.detach().to(torch.float32))
            group["params"][place] = master
            models.append(param)
            masters.append(master)
            self._versions.append(param._version)
            if param in self.optimizer.state:
                state = self.optimizer.state.pop(param)
                self.optimizer.state[master] = {k: _in_fp32(value) for k, value in state.items()}

    @torch.inference_mode(False)
    @torch.no_grad()
    def _remake_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Remakes the masters of the given model parameters (None: all)."""
        chosen = None if params is None else set(map(id, params))
        for place, (model, master) in enumerate(zip(self._models, self._masters, strict=True)):
            if chosen is None or id(model) in chosen:
                _C.remake_master(local_part(model.detach()), local_part(master.detach()))
                self._versions[place] = model._version

    def _modified(self) -> list[Tensor]:
        """Returns the model parameters that were modified since the last sync."""
        versions = zip(self._models, self._versions, strict=True)
        return [model for model, version in versions if model._version != version]

    def _follow_model(self) -> None:
        """Remakes the masters of modified model parameters."""
        self._remake_masters(self._modified())

    @torch.no_grad()
    def _masters_to_model(self) -> None:
        """Rounds the masters to the model."""
        if self._models:
            masters = [*map(local_part, self._masters)]
            torch._foreach_copy_([*map(local_part, self._models)], masters)
        self._versions = [model._version for model in self._models]

    def _reach_the_model(self) -> None:
        """Replaces `swap_ema_` and `remake_masters`, which would otherwise change only the masters.

        `ema_weights` calls `swap_ema_`. The caller replaces `step` and `zero_grad`. torch's
        optimizers have no other methods that change the model.
        """
        optimizer: Any = self.optimizer
        if hasattr(optimizer, "swap_ema_"):
            swap = optimizer.swap_ema_

            def swap_ema_() -> None:
                self._follow_model()
                swap()
                self._masters_to_model()

            optimizer.swap_ema_ = swap_ema_
        inner: Any = optimizer.optim if isinstance(optimizer, LARC) else optimizer
        if hasattr(inner, "remake_masters"):

            def remake(params: Iterable[Tensor] | None = None) -> None:
                inner._raise_if_swapped("remake_masters")
                chosen = None if params is None else list(params)
                known = {id(param) for group in optimizer.param_groups for param in group["params"]}
                known.update(map(id, self._models))
                for index, param in enumerate(chosen or ()):
                    if id(param) not in known:
                        raise ValueError(
                            f"{type(inner).__name__}.remake_masters: expected params[{index}] to "
                            "be a parameter of the model or of the optimizer, got another tensor "
                            f"of shape {list(param.shape)}."
                        )
                self._remake_masters(chosen)

            inner.remake_masters = remake


def _in_fp32(value: Any) -> Any:
    is_short = isinstance(value, Tensor) and value.dtype in _SHORT_DTYPES
    return value.to(torch.float32) if is_short else value


def refuse_swapped_step(optimizer: Any) -> None:
    """Raises while a fused optimizer's averages are swapped into the parameters."""
    inner = optimizer.optim if isinstance(optimizer, LARC) else optimizer
    if isinstance(inner, FusedOptimizer):
        inner._raise_if_swapped("step")


def refuse_tied(caller: str, models: Sequence[Tensor], known: Sequence[int]) -> list[int]:
    """Raises if two model parameters with masters overlap in memory.

    One of the two updates would be lost. The optimizer's own check sees only the masters in the
    groups, which do not overlap. Nothing is checked if the addresses equal `known`, the result of
    the last call. Returns the addresses; 0 for tensors without memory, such as fake tensors.
    """
    addresses = [local_part(param).data_ptr() for param in models]
    if addresses == known:
        return addresses
    spans = sorted(
        (address, address + _bytes_of(local_part(param)), index)
        for index, (param, address) in enumerate(zip(models, addresses, strict=True))
        if address != 0 and local_part(param).numel() > 0
    )
    reached, before = 0, -1
    for begin, end, index in spans:
        if begin < reached:
            first, second = sorted((before, index))
            raise RuntimeError(
                f"{caller}.step: expected 16-bit parameter {second} of the model, of shape "
                f"{list(models[second].shape)}, not to overlap another parameter, got memory that "
                f"parameter {first} also uses. To share a weight between two modules, share the "
                "parameter: b.weight = a.weight, not b.weight.data = a.weight.data."
            )
        if end > reached:
            reached, before = end, index
    return addresses


def _bytes_of(tensor: Tensor) -> int:
    """Returns the tensor's size in bytes, or one element's if other tensors may lie in its gaps."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor.nbytes if dense else tensor.element_size()
