# SPDX-License-Identifier: BSD-3-Clause
"""`scale_loss`: scales a loss, and unscales gradients after the backward pass."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchfuse.apex.amp.loss_scaler import LossScaler
from torchfuse.apex.amp.masters import MasterStash
from torchfuse.apex.amp.optimizers import find_stash
from torchfuse.apex.amp.stash import AmpStash
from torchfuse.apex.amp.state import initialized


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the loss times the loss scale; at the end of the block, unscales gradients.

    At the end of the block, new gradients of the optimizers' parameters are divided by the scale
    and added to gradients from before the block. If the scale is dynamic and an element is not
    finite, the scale is halved and the optimizers' next steps are skipped. A skipped step changes
    nothing and prints a line on rank 0. A dynamic scale synchronizes with the device once. If the
    block raises, the gradients from before the block are restored.

    Args:
        loss (Tensor): Loss. The scaled loss is fp32.
        optimizers (Optimizer | Sequence[Optimizer]): Optimizers whose parameters get gradients from
            this loss, prepared by `amp.initialize`.
        loss_id (int, default 0): Index of the loss scaler, less than `num_losses`.
        model: Ignored, as in apex.
        delay_unscale (bool, default False): Leave the gradients scaled, for further backward passes
            before a step. The last backward pass before a step must unscale.
        delay_overflow_check (bool, default False): Unscale, but neither adjust the scale nor skip a
            step. The program calls `amp._amp_state.loss_scalers[loss_id].update_scale()` instead.

    Raises:
        RuntimeError: if `amp.initialize` has not been called, and within another block with the
            same optimizer.
        TypeError: if the loss is not a tensor, or an optimizer is not an optimizer.
        ValueError: for an optimizer that `amp.initialize` did not prepare, or a `loss_id` out of
            range.

    Warns:
        UserWarning: if the block ends without a backward pass of the scaled loss.

    Example:
        >>> import torch
        >>> from torchfuse.apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        >>> loss = 0.5 * model(torch.ones(4, 2)).mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> model.bias.grad
        tensor([0.5000])
        >>> optimizer.step()
    """
    state = initialized("amp.scale_loss")
    if not state.opt_properties.enabled:
        yield loss
        return
    if not isinstance(loss, Tensor):
        raise TypeError(f"amp.scale_loss: expected loss to be a tensor, got {type(loss).__name__}.")
    scaler = _scaler(state.loss_scalers, loss_id)
    stashes = _stashes(optimizers)
    scale = scaler.loss_scale()
    has_masters = any(isinstance(stash, MasterStash) for stash in stashes)
    if not scaler.dynamic and scale == 1.0 and not has_masters:
        yield loss.float()
        return
    for stash in stashes:
        _check_closed(stash)
    others = {
        stash: stash.noted() for stash in AmpStash._all if scale != 1.0 and stash not in stashes
    }
    scaled_loss = loss.float() * scale
    passes: list[bool] = []  # an entry for each backward pass of the loss
    if scaled_loss.requires_grad:
        scaled_loss.register_hook(lambda grad: passes.append(True))
    seen: set[int] = set()
    fresh: list[AmpStash] = []
    try:
        for stash in stashes:
            if stash.prepare(scale, seen):
                fresh.append(stash)
        if len(fresh) == len(stashes) and all(stash.is_empty for stash in stashes):
            for stash in stashes:
                stash.skip_next_step = False  # the gradients that overflowed were cleared
        yield scaled_loss
    except BaseException:
        for stash in fresh:
            stash.restore()
        raise
    finally:
        for stash in stashes:
            stash.is_open = False
        for stash, before in others.items():
            stash.find_foreign(before, scale)
    if not delay_unscale:
        _finish(stashes, scaler, loss_id, delay_overflow_check)
    if scaled_loss.requires_grad and not passes:
        warnings.warn(
            "amp.scale_loss: expected a backward pass of the scaled loss within the block, got "
            "none. Write 'with amp.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()'.",
            stacklevel=3,
        )


def _check_closed(stash: AmpStash) -> None:
    if stash.is_open:
        raise RuntimeError(
            f"amp.scale_loss: expected no block of {type(stash.optimizer).__name__} inside another "
            "block, got two. End the first block before the second one, with delay_unscale=True if "
            "both blocks compute gradients for one step."
        )


def _finish(
    stashes: list[AmpStash], scaler: LossScaler, loss_id: int, delay_overflow_check: bool
) -> None:
    scaler.clear_overflow_state()
    for stash in stashes:
        stash.finish(scaler)
    if not delay_overflow_check and scaler.update_scale():
        for stash in stashes:
            stash.skip_next_step = True
            stash.loss_id = loss_id


def _scaler(scalers: list[LossScaler], loss_id: int) -> LossScaler:
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise ValueError(
            f"amp.scale_loss: expected loss_id to be in range({len(scalers)}), got {loss_id!r}. "
            "Pass the number of losses to amp.initialize as num_losses."
        )
    return scalers[loss_id]


def _stashes(optimizers: Any) -> list[AmpStash]:
    is_list = isinstance(optimizers, list | tuple)
    found: list[AmpStash] = []
    for index, optimizer in enumerate(optimizers if is_list else [optimizers]):
        name = f"optimizers[{index}]" if is_list else "optimizers"
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"amp.scale_loss: expected {name} to be an optimizer, got "
                f"{type(optimizer).__name__}."
            )
        stash = find_stash(optimizer)
        if stash is None:
            raise ValueError(
                f"amp.scale_loss: expected {name} to be prepared by amp.initialize, got another "
                f"{type(optimizer).__name__}. Pass the optimizer to amp.initialize with the model."
            )
        if not any(stash is other for other in found):
            found.append(stash)
    return found
