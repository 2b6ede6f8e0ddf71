# SPDX-License-Identifier: BSD-3-Clause
"""Makes an optimizer's methods act on the model when its parameter groups contain masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.distributed import local_part
from torchfuse.parallel import LARC


def reach_the_model(
    optimizer: Any,
    model: Callable[[], Iterable[Tensor]],
    follow_model: Callable[[], None],
    remake_masters: Callable[[Iterable[Tensor] | None], None],
    masters_to_model: Callable[[], None],
) -> None:
    """Replaces `swap_ema_` and `remake_masters`, which would otherwise change only the masters.

    `ema_weights` calls `swap_ema_`. The caller replaces `step` and `zero_grad`. torch's optimizers
    have no other methods that change the model.

    Args:
        optimizer: Optimizer whose parameter groups contain masters.
        model: Returns the model's parameters that have masters.
        follow_model: Remakes the masters of model parameters that were modified since the last
            step.
        remake_masters: Remakes the masters of the given model parameters (None: all).
        masters_to_model: Rounds the masters to the model.
    """
    if hasattr(optimizer, "swap_ema_"):
        swap = optimizer.swap_ema_

        def swap_ema_() -> None:
            follow_model()
            swap()
            masters_to_model()

        optimizer.swap_ema_ = swap_ema_
    inner: Any = optimizer.optim if isinstance(optimizer, LARC) else optimizer
    if hasattr(inner, "remake_masters"):

        def remake(params: Iterable[Tensor] | None = None) -> None:
            inner._raise_if_swapped("remake_masters")
            chosen = None if params is None else list(params)
            known = {id(param) for group in optimizer.param_groups for param in group["params"]}
            known.update(map(id, model()))
            for index, param in enumerate(chosen or ()):
                if id(param) not in known:
                    raise ValueError(
                        f"{type(inner).__name__}.remake_masters: expected params[{index}] to "
                        "be a parameter of the model or of the optimizer, got another tensor of "
                        f"shape {list(param.shape)}."
                    )
            remake_masters(chosen)

        inner.remake_masters = remake


def refuse_swapped_step(optimizer: Any) -> None:
    """Raises while a fused optimizer's averages are swapped into the parameters."""
    inner = optimizer.optim if isinstance(optimizer, LARC) else optimizer
    if isinstance(inner, FusedOptimizer):
        inner._raise_if_swapped("step")


def refuse_tied(caller: str, models: Sequence[Tensor], known: Sequence[int]) -> list[int]:
    """Raises if two model parameters with masters overlap in memory.

    One of the two updates would be lost. The optimizer's own check sees only the masters in the
    groups, which do not overlap.

    Args:
        caller: The optimizer's class name, for the message.
        models: The model's parameters that have masters.
        known: Addresses from the last check. If the addresses are unchanged, nothing is checked.

    Returns:
        The current addresses; 0 for tensors without memory, such as fake tensors.
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
