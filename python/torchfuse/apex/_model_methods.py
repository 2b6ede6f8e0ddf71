# SPDX-License-Identifier: BSD-3-Clause
"""Methods of an optimizer that act on the model, where masters stand in its groups."""

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
    """Replaces methods of `optimizer` that would otherwise act on the masters alone.

    `ema_weights` calls `swap_ema_`. `step` and `zero_grad` are left to the caller, who does more in
    them. An optimizer of torch has no other methods that act on the model.

    Args:
        optimizer: has masters in its groups.
        model: returns the model's parameters that have masters.
        follow_model: brings what was written to the model to the masters.
        remake_masters: does so for some parameters of the model, or for all, however written.
        masters_to_model: rounds the masters to the model.
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
    """Raises while the averages of a fused optimizer are in its parameters' place."""
    inner = optimizer.optim if isinstance(optimizer, LARC) else optimizer
    if isinstance(inner, FusedOptimizer):
        inner._raise_if_swapped("step")


def refuse_tied(caller: str, models: Sequence[Tensor], known: Sequence[int]) -> list[int]:
    """Raises if two of the model's parameters with masters overlap in memory.

    One of two updates would be lost. The step compares the tensors in the groups, which are the
    masters, and these do not overlap.

    Args:
        caller: class of the optimizer, for the message.
        models: the model's parameters that have masters.
        known: their addresses when they were compared last; equal ones are not compared again.

    Returns:
        The addresses now; 0 for tensors without memory, such as fake ones.
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
                f"{list(models[second].shape)}, to have memory of its own, got that of parameter "
                f"{first}. Two modules that share a weight have one parameter, "
                "b.weight = a.weight, and not b.weight.data = a.weight.data."
            )
        if end > reached:
            reached, before = end, index
    return addresses


def _bytes_of(tensor: Tensor) -> int:
    """Bytes that a tensor has for itself; of one with gaps, where others may lie, the first."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor.nbytes if dense else tensor.element_size()
