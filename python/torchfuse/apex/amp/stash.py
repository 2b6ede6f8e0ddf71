# SPDX-License-Identifier: BSD-3-Clause
"""Stashes, unscales and accumulates one optimizer's gradients around `scale_loss`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from torchfuse.apex.amp.containers import SHORT_DTYPES
from torchfuse.apex.amp.loss_scaler import LossScaler

#: Count of changes by the program, and a mark of each gradient by id(param).
Noted: TypeAlias = tuple[int, dict[int, tuple[int, int]]]


class AmpStash:
    """State that amp keeps for an optimizer, in `optimizer._amp_stash`.

    Note [Gradients between two scaled backward passes]
    A gradient must not sum scaled and unscaled terms. So `scale_loss` stashes unscaled gradients
    before the backward pass, unscales the new gradients, and then adds the stashed gradients.
    Gradients that stay scaled because of `delay_unscale` are rescaled to the next pass's loss
    scale. A backward pass may also reach parameters of an optimizer that was not passed to
    `scale_loss`. The new gradients of such parameters stay scaled, and that optimizer's step warns
    unless the program replaced or modified the gradients.

    Args:
        optimizer: The optimizer.
        expects_scaling: Whether the loss scale is dynamic.

    Attributes:
        is_open: Whether a `scale_loss` block with this optimizer is open.
        lazy_init_called: Whether masters exist; always True for levels without masters.
        skip_next_step: Whether the next step will be skipped.
        scaled_by: Loss scale of gradients that `delay_unscale` left scaled, or None.
        loss_id: Index of the loss scaler that found an overflow.
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
        self.had_backward = False  # whether a scaled backward pass ran since the last step
        self._owned: list[Tensor] = []
        self._saved_grads: list[tuple[Tensor, Tensor]] = []
        self._changes = 0  # counts opened blocks with this optimizer, and zero_grad() calls
        self._foreign: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # gradients left scaled
        self._foreign_scale = 1.0
        AmpStash._all.add(self)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether `scale_loss(..., delay_unscale=True)` left the gradients scaled."""
        return self.scaled_by is not None

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped."""
        return self.skip_next_step

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The optimizer's 16-bit parameters; with masters, the model's 16-bit parameters."""
        return [param for param in self.params() if param.dtype in SHORT_DTYPES]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The optimizer's fp32 parameters, including masters."""
        return [param for param in self.params() if param.dtype == torch.float32]

    def params(self) -> Iterator[Tensor]:
        """Yields the parameters that the optimizer updates."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def make_masters(self) -> None:
        """Creates missing masters if the level keeps masters."""

    # Around a backward pass.

    def prepare(self, loss_scale: float, seen: set[int]) -> bool:
        """Stashes gradients before a backward pass with `loss_scale`.

        `seen` collects ids of parameters that other optimizers in the same block already prepared.
        Returns False if the backward pass will add to gradients that are still scaled.
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
        """Whether no gradients existed before the open block."""
        return not self._saved_grads

    # Blocks without this optimizer.

    def noted(self) -> Noted:
        """Returns marks for `find_foreign`, before a block without this optimizer."""
        return self._changes, {id(param): _mark(param.grad) for param in self.params()}

    def find_foreign(self, before: Noted, loss_scale: float) -> None:
        """Records gradients that the block's backward pass left scaled."""
        changes, marks = before
        if self._changes != changes:  # an inner block with this optimizer may have written them
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
                self._expects_scaling = False  # _warn_without_scaling() would be misleading
                warnings.warn(
                    f"{type(self.optimizer).__name__}.step: expected unscaled gradients, got "
                    f"gradients scaled by {self._foreign_scale} from amp.scale_loss with another "
                    "optimizer. Call zero_grad() before backward, or pass both optimizers: "
                    "amp.scale_loss(loss, [one, other]).",
                    stacklevel=5,
                )
                return

    def forget(self) -> None:
        """Drops stashed gradients, after `zero_grad()`."""
        self._saved_grads = []
        self._foreign = {}
        self._changes += 1
        if not self.is_open:
            self.scaled_by = None
            self.skip_next_step = False

    def _scaled_grads(self) -> list[Tensor]:
        return [param.grad for param in self._owned if param.grad is not None]

    def restore(self) -> None:
        """Restores the gradients from before the first `prepare`, after a failed backward pass."""
        for param in self._owned:
            param.grad = None
        self._return_grads()

    @torch.no_grad()
    def finish(self, scaler: LossScaler) -> None:
        """Unscales a backward pass's gradients, and adds the stashed gradients."""
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
        """Checks that the gradients are ready for a step."""
        name = f"{type(self.optimizer).__name__}.step"
        if self.is_open:
            raise RuntimeError(
                f"{name}() was called within a block of amp.scale_loss. The gradients are unscaled "
                "when the block ends. Call step() after the block."
            )
        self._warn_of_foreign()
        if self.scaled_by is not None:
            raise RuntimeError(
                f"{name}: expected unscaled gradients, got gradients scaled by {self.scaled_by} "
                "from amp.scale_loss(..., delay_unscale=True). Leave delay_unscale out for the "
                "last backward pass before a step."
            )
        if self._expects_scaling and not self.had_backward:
            self._warn_without_scaling()

    def _warn_without_scaling(self) -> None:
        if any(param.grad is not None for param in self.params()):
            self._expects_scaling = False  # warned
            warnings.warn(
                f"{type(self.optimizer).__name__}.step: expected gradients from amp.scale_loss, "
                "got unscaled gradients. Small gradients may vanish in fp16. Call backward() "
                "within 'with amp.scale_loss(loss, optimizer) as scaled_loss'.",
                stacklevel=4,
            )

    def after_step(self) -> None:
        """Cleans up after a step that was not skipped."""
        self.had_backward = False


def _mark(grad: Tensor | None) -> tuple[int, int]:
    """Returns a value that changes when a gradient is replaced or modified in place."""
    if grad is None:
        return 0, 0
    return id(grad), 0 if grad.is_inference() else grad._version
