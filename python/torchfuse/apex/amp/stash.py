# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of one optimizer around `scale_loss`: set aside, unscaled and accumulated."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from torchfuse.apex.amp.containers import SHORT_DTYPES
from torchfuse.apex.amp.loss_scaler import LossScaler

#: Changes by the program, and what marks each gradient.
Noted: TypeAlias = tuple[int, dict[int, tuple[int, int]]]


class AmpStash:
    """What amp keeps for an optimizer, in `optimizer._amp_stash`.

    Note [Gradients between two scaled backward passes]
    A gradient is either unscaled, or a sum of gradients of one loss scale. So `scale_loss` sets
    unscaled gradients aside before the backward pass, and adds them after it has unscaled the new
    ones. Gradients that stay scaled, with `delay_unscale`, are brought to the next pass's scale.
    The pass may also reach parameters of optimizers that `scale_loss` was not given: their new
    gradients stay scaled. The step warns of them unless they were replaced or written.

    Args:
        optimizer: the optimizer.
        expects_scaling: whether its losses have a dynamic scale.

    Attributes:
        is_open: whether a block of `scale_loss` with this optimizer has begun and not ended.
        lazy_init_called: whether masters exist; always True in levels without masters.
        skip_next_step: whether the next step is to be skipped.
        scaled_by: loss scale of the gradients that `delay_unscale` has left, or None.
        loss_id: index of the loss scaler that has found an overflow.
    """

    lazy_init_called = True
    _all: ClassVar[weakref.WeakSet[AmpStash]] = weakref.WeakSet()

    def __init__(self, optimizer: torch.optim.Optimizer, expects_scaling: bool = False) -> None:
        self.optimizer = optimizer
        self.is_open = False
        self._expects_scaling = expects_scaling
        self.skip_next_step = False
        self.scaled_by: float | None = None
        self.loss_id = 0
        self.had_backward = False  # a scaled one, since the last step
        self._owned: list[Tensor] = []
        self._saved_grads: list[tuple[Tensor, Tensor]] = []
        self._changes = 0  # own blocks that began, and calls of zero_grad()
        self._foreign: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # those of others
        self._foreign_scale = 1.0
        AmpStash._all.add(self)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether the gradients are scaled, after `scale_loss(..., delay_unscale=True)`."""
        return self.scaled_by is not None

    @property
    def already_patched(self) -> bool:
        """Whether the next step is to be skipped."""
        return self.skip_next_step

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """16-bit parameters of the optimizer; with masters, those of the model."""
        return [param for param in self.params() if param.dtype in SHORT_DTYPES]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """fp32 parameters of the optimizer."""
        return [param for param in self.params() if param.dtype == torch.float32]

    def params(self) -> Iterator[Tensor]:
        """Yields the parameters that the optimizer updates."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def make_masters(self) -> None:
        """Creates masters that are missing, in levels with masters."""

    # Around a backward pass.

    def prepare(self, loss_scale: float, seen: set[int]) -> bool:
        """Sets gradients aside, before a backward pass of a loss times `loss_scale`.

        `seen` has the ids of parameters that other optimizers of the same pass have prepared.
        Returns False if there are scaled gradients, to which the backward pass adds.
        """
        self.is_open = True
        self._changes += 1
        self._owned = [param for param in self.params() if id(param) not in seen]
        seen.update(map(id, self._owned))
        is_first = self.scaled_by is None
        if self.scaled_by not in (None, loss_scale):
            with torch.no_grad():
                for grad in self._scaled_grads():
                    grad.mul_(loss_scale / self.scaled_by)
        self.scaled_by = loss_scale
        for param in self._owned if is_first else ():
            if param.grad is not None:
                self._saved_grads.append((param, param.grad))
                param.grad = None
        return is_first

    @property
    def is_empty(self) -> bool:
        """Whether there were no gradients before the block that is open."""
        return not self._saved_grads

    # Passes that other optimizers are given.

    def noted(self) -> Noted:
        """Returns what `find_foreign` compares with, before a pass that is not for this one."""
        return self._changes, {id(param): _mark(param.grad) for param in self.params()}

    def find_foreign(self, before: Noted, loss_scale: float) -> None:
        """Finds gradients that the pass has left scaled."""
        changes, marks = before
        if self._changes != changes:  # they may be those of an own block inside
            return
        found = [param for param in self.params() if _mark(param.grad) != marks.get(id(param))]
        for param in found:
            if param.grad is not None:
                self._foreign[id(param)] = weakref.ref(param.grad), _mark(param.grad)[1]
                self._foreign_scale = loss_scale

    def _warn_of_foreign(self) -> None:
        grads = {id(param): param.grad for param in self.params()} if self._foreign else {}
        foreign, self._foreign = self._foreign, {}
        for key, (reference, version) in foreign.items():
            grad = grads.get(key)
            if grad is not None and reference() is grad and _mark(grad)[1] == version:
                self._expects_scaling = False  # the other warning would be misleading
                warnings.warn(
                    f"{type(self.optimizer).__name__}.step: expected unscaled gradients, got some "
                    "of a loss that amp.scale_loss scaled for another optimizer, "
                    f"{self._foreign_scale} times as large. Call zero_grad() before, or pass both "
                    "optimizers: amp.scale_loss(loss, [one, other]).",
                    stacklevel=5,
                )
                return

    def forget(self) -> None:
        """Drops all gradients of before; `zero_grad()` has been called."""
        self._saved_grads = []
        self._foreign = {}
        self._changes += 1
        if not self.is_open:
            self.scaled_by = None
            self.skip_next_step = False

    def _scaled_grads(self) -> list[Tensor]:
        return [param.grad for param in self._owned if param.grad is not None]

    def restore(self) -> None:
        """Returns to the gradients before the first `prepare`, after a failed backward pass."""
        for param in self._owned:
            param.grad = None
        self._return_grads()

    @torch.no_grad()
    def finish(self, scaler: LossScaler) -> None:
        """Unscales the gradients of a backward pass, and adds those that were set aside."""
        scaler.unscale_(self._owned)
        self._return_grads()
        self.had_backward = True

    def _return_grads(self) -> None:
        new: list[Tensor] = []
        old: list[Tensor] = []
        for param, grad in self._saved_grads:
            if param.grad is None:
                param.grad = grad
            elif grad.layout is torch.strided and param.grad.layout is torch.strided:
                new.append(param.grad)
                old.append(grad)
            else:
                param.grad = param.grad + grad
        if new:
            torch._foreach_add_(new, old)
        self._saved_grads = []
        self.scaled_by = None

    # Around a step.

    def before_step(self) -> None:
        """Checks that the gradients may be used."""
        name = f"{type(self.optimizer).__name__}.step"
        if self.is_open:
            raise RuntimeError(
                f"{name}: expected a call after the block of amp.scale_loss, got one inside. The "
                "gradients are unscaled when the block ends: call step() after it."
            )
        self._warn_of_foreign()
        if self.scaled_by is not None:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step: expected unscaled gradients, got those of "
                f"amp.scale_loss(..., delay_unscale=True), which are {self.scaled_by} times as "
                "large. Leave delay_unscale out for the last backward pass before a step."
            )
        if self._expects_scaling and not self.had_backward:
            self._warn_without_scaling()

    def _warn_without_scaling(self) -> None:
        if any(param.grad is not None for param in self.params()):
            self._expects_scaling = False  # warned
            warnings.warn(
                f"{type(self.optimizer).__name__}.step: expected gradients from amp.scale_loss, "
                "got others. Small gradients may have vanished in fp16. Call backward() within "
                "'with amp.scale_loss(loss, optimizer) as scaled_loss'.",
                stacklevel=4,
            )

    def after_step(self) -> None:
        """Does what follows a step, also a skipped one."""
        self.had_backward = False


def _mark(grad: Tensor | None) -> tuple[int, int]:
    """What changes when a gradient is replaced or written."""
    if grad is None:
        return 0, 0
    return id(grad), 0 if grad.is_inference() else grad._version
