# SPDX-License-Identifier: BSD-3-Clause
"""Methods of an optimizer that act on the model, where masters stand in its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def reach_the_model(
    optimizer: Any,
    follow_model: Callable[[], None],
    remake_masters: Callable[[Iterable[Tensor] | None], None],
    masters_to_model: Callable[[], None],
) -> None:
    """Replaces methods of `optimizer` that would otherwise act on the masters alone.

    `ema_weights` calls `swap_ema_`. `step` and `zero_grad` are left to the caller, who does more in
    them. An optimizer of torch has no other methods that act on the model.

    Args:
        optimizer: has masters in its groups.
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
    if hasattr(optimizer, "remake_masters"):

        def remake(params: Iterable[Tensor] | None = None) -> None:
            optimizer._refuse_swapped("remake_masters")
            remake_masters(params)

        optimizer.remake_masters = remake
