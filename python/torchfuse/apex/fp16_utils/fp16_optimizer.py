# SPDX-License-Identifier: BSD-3-Clause
"""Wraps an optimizer with fp32 masters and a loss scale, for programs older than `apex.amp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchfuse import clip_grad_norm_
from torchfuse._delegation import attribute_of
from torchfuse.apex._model_methods import Masters, refuse_swapped_step, refuse_tied
from torchfuse.apex.fp16_utils.fp16util import (
    model_grads_to_master_grads,
)
from torchfuse.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, unscale_
from torchfuse.optimizers.distributed import refuse_norm_groups

_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step")


class FP16_Optimizer(Masters):
    """Adds fp32 masters and a loss scale to an optimizer with 16-bit and fp32 parameters.

    The masters replace the 16-bit parameters in the optimizer's parameter groups. If the optimizer
    keeps averages, `optimizer.optimizer.ema_weights()` swaps the averages into the model, after
    updating masters whose model parameters the program modified.

    Args:
        init_optimizer (Optimizer): Optimizer to wrap.
        static_loss_scale (float, default 1): Constant loss scale.
        dynamic_loss_scale (bool, default False): Use a `DynamicLossScaler` instead.
        dynamic_loss_args (Mapping | None, default None): Keyword arguments of the
            `DynamicLossScaler`. Ignored with a constant scale.
        verbose (bool, default True): Print a line when a step is skipped.

    Attributes:
        optimizer (Optimizer): The wrapped optimizer.
        overflow (bool): Whether the last backward pass produced a gradient that is not finite.
        loss_scaler (LossScaler): The `LossScaler` or `DynamicLossScaler`.

    Raises:
        TypeError: if `init_optimizer` is not an optimizer.
        ValueError: for a loss scale that is not a positive, finite number, and for an optimizer
            whose gradients are sharded over processes.

    Example:
        >>> import torch
        >>> from torchfuse.apex.fp16_utils import FP16_Optimizer
        >>> model = torch.nn.Linear(2, 1).half()
        >>> inside = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = FP16_Optimizer(inside, static_loss_scale=128.0)
        >>> optimizer.zero_grad()
        >>> optimizer.backward(model(torch.ones(3, 2).half()).float().sum())
        >>> optimizer.step()
        >>> optimizer.fp32_from_fp16_groups[0][1].dtype
        torch.float32
    """

    state: Any = attribute_of("optimizer", "state", "The wrapped optimizer's state.")
    param_groups: Any = attribute_of(
        "optimizer", "param_groups", "The wrapped optimizer's parameter groups, with masters."
    )

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, torch.optim.Optimizer):
            raise TypeError(
                "FP16_Optimizer: expected init_optimizer to be a torch.optim.Optimizer, got "
                f"{type(init_optimizer).__name__}."
            )
        refuse_norm_groups("FP16_Optimizer", init_optimizer)
        super().__init__(init_optimizer)
        self.verbose = verbose
        self._has_grads = False  # whether update_master_grads() ran since the last step
        self.overflow = False
        self.first_closure_call_this_step = True
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler = (
            DynamicLossScaler(**(dynamic_loss_args or {}))
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        groups = init_optimizer.param_groups
        self.fp16_groups: list[list[Tensor]] = [[] for _ in groups]
        self.fp32_from_fp16_groups: list[list[Tensor]] = [[] for _ in groups]
        for lists in zip(groups, self.fp16_groups, self.fp32_from_fp16_groups, strict=True):
            self._create_masters(*lists)
        masters = set(map(id, self._masters))
        self.fp32_from_fp32_groups: list[list[Tensor]] = [
            [param for param in group["params"] if param.requires_grad and id(param) not in masters]
            for group in groups
        ]
        # Casts existing state to fp32, because the parameters are now fp32.
        init_optimizer.load_state_dict(init_optimizer.state_dict())
        self._reach_the_model()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connects a copy's optimizer to the copy's model, after copy.deepcopy and pickle."""
        vars(self).update(state)
        # Version counters of copied tensors restart, so treat every model parameter as modified.
        self._versions = [-1] * len(self._models)
        self._reach_the_model()

    # From the public lists, which programs may edit.

    @property
    def _models(self) -> list[Tensor]:
        return list(chain.from_iterable(self.fp16_groups))

    @property
    def _masters(self) -> list[Tensor]:
        return list(chain.from_iterable(self.fp32_from_fp16_groups))

    @property
    def loss_scale(self) -> float:
        """The current loss scale. Assigning a value sets the scale."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Resets the model's and the masters' gradients.

        Args:
            set_grads_to_None (bool, default False): Set the model's gradients to None instead of 0.
        """
        for master in self._masters:
            master.grad = None
        for param in chain(self._models, *self.fp32_from_fp32_groups):
            if param.grad is not None and not set_grads_to_None:
                param.grad.detach_().zero_()
            else:
                param.grad = None

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs the scaled loss's backward pass, and unscales the masters' gradients.

        Args:
            loss (Tensor): Loss, cast to fp32 before scaling.
            update_master_grads (bool, default True): Pass False to accumulate several losses, and
                call `update_master_grads()` after the last backward pass.
            retain_graph (bool, default False): As for `Tensor.backward`.
        """
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copies the model's gradients to the masters and unscales, unless a gradient overflows."""
        self._has_grads = True
        others = [param for group in self.fp32_from_fp32_groups for param in group]
        self.overflow = self.loss_scaler.has_overflow([*self._models, *others])
        if self.overflow:
            return
        model_grads_to_master_grads(self._models, self._masters)
        unscale_([*self._masters, *others], self.loss_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clips the unscaled gradients and returns the initial norm; -1 after an overflow."""
        params = [param for group in self.param_groups for param in group["params"]]
        return -1 if self.overflow else clip_grad_norm_(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Returns gradients by group; after an overflow, prints a line and returns None."""
        if self.overflow:
            print("FP16_Optimizer: no gradients to inspect, because they overflowed.")
            return None
        return [
            [None if param.grad is None else param.grad.detach() for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adjusts the loss scale and, unless a gradient overflowed, updates masters and model.

        Args:
            closure (Callable | None, default None): Computes the loss and calls `backward(loss)` on
                this wrapper. While the gradients overflow, the closure is called again with a lower
                scale.

        Raises:
            RuntimeError: if the masters have not received the model's gradients, or two model
                parameters overlap in memory.
        """
        refuse_swapped_step(self.optimizer)  # before the loss scale changes
        self._addresses = refuse_tied(type(self).__name__, self._models, self._addresses)
        if closure is None:
            self._check_grads()
            result = None if self.overflow else self.optimizer.step()  # may raise
        self._has_grads = False
        scale = self.loss_scaler.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            if self.verbose:
                print(
                    "Gradient overflow: skipped a step of FP16_Optimizer. The loss scale was "
                    f"{scale} and is now {self.loss_scaler.loss_scale}."
                )
            return None
        if closure is not None:
            result = self._step_with(closure)
            self._has_grads = False
        self._masters_to_model()
        return result

    def _check_grads(self) -> None:
        """Raises if the model has gradients that were not copied to the masters."""
        copied = self._has_grads or any(master.grad is not None for master in self._masters)
        grads = (model.grad for model in self._models)
        if copied or not any(grad is not None and grad.any() for grad in grads):
            return
        raise RuntimeError(
            "FP16_Optimizer.step: expected gradients from optimizer.backward(loss) since the last "
            "step, got gradients that are older or were not copied to the masters. Call "
            "optimizer.backward(loss) instead of loss.backward(). After update_master_grads=False, "
            "call update_master_grads()."
        )

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def scaled_closure() -> Any:
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:
                self._masters_to_model()
            loss = closure()
            while self.overflow:
                self.loss_scaler.update_scale(True)
                loss = closure()
            return loss

        result = self.optimizer.step(scaled_closure)
        self.first_closure_call_this_step = True
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns a state dict of tensors and numbers, loadable with `weights_only=True`.

        First updates masters whose model parameters the program modified.
        """
        self._follow_model()
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [
                [master.detach() for master in masters] for masters in self.fp32_from_fp16_groups
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict from this class, or from apex with a pickled loss scaler.

        If the keys or shapes do not match, nothing changes.

        Args:
            state_dict (Mapping): State dict to load.

        Raises:
            KeyError: if a key is missing.
            ValueError: if the masters' shapes differ.
        """
        for key in (*_KEYS, "optimizer_state_dict", "fp32_from_fp16"):
            if key not in state_dict:
                raise KeyError(
                    f"FP16_Optimizer.load_state_dict: expected state_dict to have {key!r}, got "
                    f"only {sorted(state_dict)}."
                )
        saved = state_dict["fp32_from_fp16"]
        shapes = [[list(param.shape) for param in group] for group in saved]
        own = [[list(param.shape) for param in group] for group in self.fp32_from_fp16_groups]
        if shapes != own:
            raise ValueError(
                "FP16_Optimizer.load_state_dict: expected state_dict['fp32_from_fp16'] to have the "
                f"shapes {own}, got {shapes}. The checkpoint belongs to another model."
            )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        scaler = state_dict["loss_scaler"]
        numbers = scaler if isinstance(scaler, Mapping) else vars(scaler)
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.loss_scaler = DynamicLossScaler() if self.dynamic_loss_scale else LossScaler()
        self.loss_scaler.load_state_dict(dict(numbers))
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        for master, value in zip(self._masters, chain.from_iterable(saved), strict=True):
            master.copy_(value)
        # If the program modifies the model later, for example by loading it, the masters follow.
        self._versions = [model._version for model in self._models]
