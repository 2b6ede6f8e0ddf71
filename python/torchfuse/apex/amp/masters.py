# SPDX-License-Identifier: BSD-3-Clause
"""Replaces an optimizer's 16-bit parameters by fp32 masters, for any optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchfuse.apex._model_methods import Masters, refuse_tied
from torchfuse.apex.amp.containers import SHORT_DTYPES
from torchfuse.apex.amp.loss_scaler import LossScaler
from torchfuse.apex.amp.stash import AmpStash
from torchfuse.optimizers.distributed import local_part
from torchfuse.optimizers.serialization import AMP_MASTERS


class MasterStash(Masters, AmpStash):
    """An `AmpStash` with masters.

    Note [Masters stand in the parameter groups]
    As in apex, the parameter groups contain the masters, so programs clip, average and save masters
    with fp32 gradients. The fused optimizers could keep masters in the optimizer's state instead,
    but gradients would then stay 16-bit, and small gradients would vanish when they are unscaled.
    Any optimizer class therefore sees fp32 parameters only.

    Attributes:
        all_fp32_from_fp16_params (list[Tensor]): The masters, in the order of `all_fp16_params`.
    """

    _models: list[Tensor]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        Masters.__init__(self, optimizer)
        AmpStash.__init__(self, optimizer)  # before_step() raises for a step without scaling
        self.lazy_init_called = False
        self._models = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        self._are_loaded = False  # whether masters were loaded, and not used or remade since
        self._loaded: Mapping[int, Tensor] = {}

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The model's parameters that have masters."""
        return self._models

    @property
    def _masters(self) -> list[Tensor]:
        return self.all_fp32_from_fp16_params

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """`all_fp16_params`, a list for each parameter group."""
        model_of = dict(zip(map(id, self._masters), self._models, strict=True))
        return [
            [model_of[id(param)] for param in group["params"] if id(param) in model_of]
            for group in self.optimizer.param_groups
        ]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters, a list for each parameter group."""
        masters = set(map(id, self._masters))
        return [
            [param for param in group["params"] if id(param) in masters]
            for group in self.optimizer.param_groups
        ]

    # Creation.

    def make_masters(self) -> None:
        """Creates missing masters in the groups, and remakes masters of modified parameters."""
        if self._are_loaded:
            self._remake_masters()
        else:
            self._follow_model()
        self._are_loaded = False

    def _remake_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Also creates missing masters, and remakes masters of modified parameters."""
        self.lazy_init_called = True
        for group in self.optimizer.param_groups:
            self._create_masters(group, self._models, self._masters)
        super()._remake_masters(None if params is None else [*params, *self._modified()])

    # Around a backward pass.

    def prepare(self, loss_scale: float, seen: set[int]) -> bool:
        """Makes masters and stashes gradients."""
        self.make_masters()
        if self.scaled_by is None:
            for model in self._models:
                model.grad = None
        return super().prepare(loss_scale, seen)

    def _scaled_grads(self) -> list[Tensor]:
        models = [model.grad for model in self._models if model.grad is not None]
        return [*models, *super()._scaled_grads()]

    def restore(self) -> None:
        """Restores the gradients from before the first `prepare`, after a failed backward pass."""
        for model in self._models:
            model.grad = None
        super().restore()

    @torch.no_grad()
    def finish(self, scaler: LossScaler) -> None:
        """Copies the model's gradients to the masters in fp32, and unscales the copies."""
        wide: list[Tensor] = []
        short: list[Tensor] = []
        for model, master in zip(self._models, self._masters, strict=True):
            grad = model.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                master.grad = grad.to(torch.float32)
                continue
            master.grad = torch.empty_like(grad, dtype=torch.float32)
            wide.append(master.grad)
            short.append(grad)
        if wide:
            torch._foreach_copy_([*map(local_part, wide)], [*map(local_part, short)])
        super().finish(scaler)

    # Around a step.

    @torch.no_grad()
    def before_step(self) -> None:
        """Checks that the masters have received the model's gradients."""
        super().before_step()
        caller = type(self.optimizer).__name__
        self._addresses = refuse_tied(caller, self._models, self._addresses)
        if self.had_backward:
            return
        sources = self._models if self.lazy_init_called else list(self.params())
        for param in sources:
            if param.dtype in SHORT_DTYPES and param.grad is not None and param.grad.any():
                raise RuntimeError(
                    f"{type(self.optimizer).__name__}.step: expected gradients from "
                    "amp.scale_loss since the last step, got gradients that are older or were not "
                    "copied to the masters. Call backward() within "
                    "'with amp.scale_loss(loss, optimizer) as scaled_loss'."
                )
        self.make_masters()

    @torch.no_grad()
    def after_step(self) -> None:
        """Rounds the masters to the model, after a step that was not skipped."""
        super().after_step()
        self._masters_to_model()

    def _masters_to_model(self) -> None:
        super()._masters_to_model()
        self._are_loaded = False

    def drop_master_grads(self) -> None:
        """Clears the masters' gradients, which `model.zero_grad()` does not reach."""
        for master in self._masters:
            master.grad = None

    def zero_model_grads(self, set_to_none: bool) -> None:
        """Resets the model's gradients, which `optimizer.zero_grad()` does not reach."""
        for model in self._models:
            if model.grad is not None and not set_to_none:
                model.grad.detach_().zero_()
            else:
                model.grad = None

    # Checkpoints.

    def save(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Updates masters from the model, and adds masters to the optimizer's state dict."""
        if self.lazy_init_called:
            self._follow_model()
        masters = set(map(id, self._masters))
        state_dict[AMP_MASTERS] = {
            number: param.detach()
            for number, param in enumerate(self.params())
            if id(param) in masters
        }

    def check_loaded(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Checks saved masters, and makes masters first so that the loaded state stays fp32."""
        self._loaded = {}
        saved: Mapping[int, Tensor] = state_dict.get(AMP_MASTERS, {})
        params = list(self.params())
        where = (
            f"{type(self.optimizer).__name__}.load_state_dict: expected state_dict['{AMP_MASTERS}']"
        )
        for number, master in saved.items():
            if not 0 <= number < len(params) or master.shape != params[number].shape:
                raise ValueError(
                    f"{where} to fit the optimizer's {len(params)} parameters, got master {number} "
                    f"of shape {list(master.shape)}. The checkpoint belongs to another model."
                )
        self.make_masters()
        self._loaded = saved
        return {key: value for key, value in state_dict.items() if key != AMP_MASTERS}

    @torch.no_grad()
    def load(self, optimizer: torch.optim.Optimizer) -> None:
        """Copies loaded masters. The next backward pass or step remakes masters from the model."""
        masters = set(map(id, self._masters))
        for number, param in enumerate(self.params()):
            if number in self._loaded and id(param) in masters:
                param.copy_(self._loaded[number])
        if self._loaded:
            self._are_loaded = True
            self._versions = [model._version for model in self._models]
        self._loaded = {}
