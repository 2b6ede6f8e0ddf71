# SPDX-License-Identifier: BSD-3-Clause
"""Attaches a stash to optimizers, and wraps `step` and `zero_grad`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch

from torchfuse.apex.amp.masters import MasterStash
from torchfuse.apex.amp.stash import AmpStash
from torchfuse.apex.amp.state import _amp_state, maybe_print
from torchfuse.optimizers.distributed import refuse_norm_groups
from torchfuse.parallel import LARC


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Checks the optimizers passed to `initialize`, before anything changes."""
    from torchfuse.apex.fp16_utils.fp16_optimizer import FP16_Optimizer

    seen: set[int] = set()
    for index, optimizer in enumerate(optimizers):
        where = f"amp.initialize: expected optimizers[{index}] to be"
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                f"{where} the optimizer itself, got an FP16_Optimizer. Pass the wrapped optimizer, "
                "because amp itself scales the loss and keeps masters."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{where} a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        refuse_norm_groups(f"amp.initialize, optimizers[{index}]", optimizer)
        if find_stash(optimizer) is not None or id(optimizer) in seen:
            raise RuntimeError(
                f"{where} passed to amp.initialize once, got this {type(optimizer).__name__} a "
                "second time. Create a new optimizer, or use the optimizer that the first call "
                "returned."
            )
        seen.add(id(optimizer))


def find_stash(optimizer: Any) -> AmpStash | None:
    """Returns the optimizer's stash, or None if `initialize` did not prepare the optimizer."""
    stash: AmpStash | None = vars(optimizer).get("_amp_stash")
    if stash is None and isinstance(optimizer, LARC):
        return find_stash(optimizer.optim)
    return stash


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, master_weights: bool, expects_scaling: bool
) -> None:
    """Attaches a stash. With `expects_scaling`, a step without `scale_loss` warns."""
    stash = MasterStash(optimizer) if master_weights else AmpStash(optimizer, expects_scaling)
    attributes: Any = optimizer
    attributes._amp_stash = stash
    attributes._lazy_init_maybe_master_weights = stash.make_masters
    attributes.step = MethodType(_amp_step(optimizer.step), optimizer)
    attributes.zero_grad = MethodType(_zero_grad(optimizer.zero_grad), optimizer)
    if isinstance(stash, MasterStash):
        stash._reach_the_model()
        optimizer.register_state_dict_post_hook(stash.save)
        optimizer.register_load_state_dict_pre_hook(stash.check_loaded)
        optimizer.register_load_state_dict_post_hook(stash.load)


def _amp_step(step: Any) -> Any:
    # wraps() copies the mark that a learning rate scheduler sets on `step` and checks later.
    @functools.wraps(step)
    def amp_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stash: AmpStash = optimizer._amp_stash
        if any(callable(value) for value in (*args, *kwargs.values())):
            _check_closure(optimizer, stash)
        if stash.skip_next_step:
            _skip(optimizer, stash)
            return None
        stash.before_step()
        result = step(*args, **kwargs)
        stash.after_step()
        if isinstance(stash, MasterStash):
            stash.drop_master_grads()
        return result

    return amp_step


def _check_closure(optimizer: Any, stash: AmpStash) -> None:
    """Raises if a closure would bypass the masters, or overflow too late to skip the step."""
    where = f"{type(optimizer).__name__}.step: expected no closure with"
    remedy = "Compute the gradients first, within amp.scale_loss"
    if isinstance(stash, MasterStash):
        raise RuntimeError(f"{where} master weights, got one. {remedy}.")
    if any(scaler.dynamic for scaler in _amp_state.loss_scalers):
        raise RuntimeError(
            f"{where} a dynamic loss scale, got one. An overflow in the closure would be found too "
            f"late to skip the step. {remedy}, or pass loss_scale=1.0 to amp.initialize."
        )


def _skip(optimizer: Any, stash: AmpStash) -> None:
    stash.skip_next_step = False
    stash.had_backward = False
    optimizer._opt_called = True  # otherwise a scheduler warns about a missing optimizer.step()
    if isinstance(stash, MasterStash):
        stash.drop_master_grads()
    scale = _amp_state.loss_scalers[stash.loss_id].loss_scale()
    maybe_print(
        f"Gradient overflow: skipped a step of {type(optimizer).__name__}; the loss scale of loss "
        f"scaler {stash.loss_id} is now {scale}.",
        rank0=True,
    )


def _zero_grad(zero_grad: Any) -> Any:
    @functools.wraps(zero_grad)
    def amp_zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stash: AmpStash = optimizer._amp_stash
        result = zero_grad(*args, **kwargs)
        stash.forget()
        if isinstance(stash, MasterStash):
            stash.drop_master_grads()
            set_to_none = kwargs.get("set_to_none", args[0] if args else True)
            stash.zero_model_grads(set_to_none is not False)
        return result

    return amp_zero_grad
