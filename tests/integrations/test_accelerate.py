# SPDX-License-Identifier: BSD-3-Clause
"""accelerate: our scaler and optimizer behind Accelerator and AcceleratedOptimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trained_alike import assert_trained_alike, make_network, weights

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

# The first steps overflow in fp16, and the scale grows again later.
SCALING = GradScalerKwargs(init_scale=2.0**21, growth_interval=8)
MAX_GRAD_NORM = 0.1


@pytest.fixture(autouse=True)
def _fresh_accelerator_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def adam(model: nn.Module) -> FusedAdam:
    return FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, **options)


class Run:
    """What a program with accelerate consists of; `scaler` takes the place of accelerate's own."""

    def __init__(
        self,
        make_optimizer: Any,
        digits: tuple[Tensor, Tensor],
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, **options)
        # Accelerator(mixed_precision="fp16") wants a GPU, where it makes torch's scaler.
        self.accelerator.scaler = scaler
        self.dtype = torch.float16 if scaler is not None else torch.bfloat16
        model = make_network()
        loader = DataLoader(TensorDataset(*digits), batch_size=32)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, make_optimizer(model), loader
        )
        self.skipped: list[bool] = []  # what accelerate says
        self.norms: list[float] = []  # before clipping

    def unscale(self) -> None:
        """accelerate does so itself with mixed_precision="fp16", which it refuses on the CPU."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(self.optimizer.optimizer)

    def epoch(self, clip: bool = False) -> None:
        for images, labels in self.loader:
            with torch.autocast("cpu", self.dtype):
                loss = nn.functional.cross_entropy(self.model(images), labels)
            self.accelerator.backward(loss)
            if clip:
                self.unscale()
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
                self.norms.append(norm.item())
            self.optimizer.step()
            self.skipped.append(self.optimizer.step_was_skipped)
            self.optimizer.zero_grad()


def our_scaler() -> GradScaler:
    return GradScaler("cpu", **SCALING.to_kwargs())


def torch_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **SCALING.to_kwargs())


def by_hand(digits: tuple[Tensor, Tensor], epochs: int, clip: bool) -> Any:
    """Returns the model, the scaler and the norms of the same training without accelerate."""
    model, norms, scaler = make_network(), [], torch_scaler()
    optimizer = adamw(model)
    for images, labels in [*DataLoader(TensorDataset(*digits), batch_size=32)] * epochs:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler, norms


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("make_optimizer", [adam, adamw])
@pytest.mark.parametrize("make_scaler", [our_scaler, torch_scaler])
def test_fp16_with_our_optimizer_our_scaler_and_both(
    make_scaler: Any, make_optimizer: Any, clip: bool, digits: tuple[Tensor, Tensor]
) -> None:
    ours = Run(make_optimizer, digits, make_scaler())
    for _ in range(2):
        ours.epoch(clip)
    model, scaler, norms = by_hand(digits, 2, clip)
    assert_trained_alike(ours.model, model, make_network())
    assert ours.accelerator.scaler.state_dict() == scaler.state_dict()
    assert ours.norms == pytest.approx(norms, rel=1e-2, nan_ok=True)


def test_the_optimizers_own_clipping_needs_no_unscaling(digits: tuple[Tensor, Tensor]) -> None:
    ours = Run(
        lambda model: FusedAdam(
            model.parameters(), lr=3e-3, weight_decay=0.01, max_grad_norm=MAX_GRAD_NORM
        ),
        digits,
        our_scaler(),
    )
    ours.epoch()
    assert_trained_alike(ours.model, by_hand(digits, 1, clip=True)[0], make_network())


def follow_last_step_skipped(accelerated: AcceleratedOptimizer) -> None:
    """As docs/integrations.md has it."""

    def tell(optimizer: FusedAdam, *_: Any) -> None:
        accelerated._accelerate_step_called = not optimizer.last_step_skipped()

    accelerated.optimizer.register_step_post_hook(tell)


def test_step_was_skipped_follows_the_optimizer(digits: tuple[Tensor, Tensor]) -> None:
    """accelerate sees whether step() was called; a fused step is called, and skips inside."""
    unfused = Run(adamw, digits, torch_scaler())
    fused = Run(lambda model: adamw(model, fused=True), digits, torch_scaler())
    ours, told = Run(adam, digits, our_scaler()), Run(adam, digits, our_scaler())
    follow_last_step_skipped(told.optimizer)
    for run in (unfused, fused, ours, told):
        run.epoch()
    assert any(unfused.skipped)
    # So it says nothing of torch's fused optimizers, nor of ours without the hook.
    assert not any(fused.skipped)
    assert not any(ours.skipped)
    assert told.skipped == unfused.skipped
    assert ours.accelerator.scaler.skipped_steps() == sum(unfused.skipped)


def test_schedulers_wait_for_skipped_steps(digits: tuple[Tensor, Tensor]) -> None:
    counts = []
    for make_optimizer, scaler in ((adamw, torch_scaler()), (adam, our_scaler())):
        run = Run(make_optimizer, digits, scaler)
        scheduler = run.accelerator.prepare(
            torch.optim.lr_scheduler.LinearLR(run.optimizer.optimizer)
        )
        if make_optimizer is adam:
            follow_last_step_skipped(run.optimizer)
        for images, labels in run.loader:
            with torch.autocast("cpu", torch.float16):
                run.accelerator.backward(nn.functional.cross_entropy(run.model(images), labels))
            run.optimizer.step()
            run.optimizer.zero_grad()
            scheduler.step()
        counts.append(scheduler.scheduler.last_epoch)
    assert counts[0] == counts[1] < len(run.loader)


def test_save_state_and_load_state(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    whole = Run(adam, digits, our_scaler())
    whole.epoch()
    whole.accelerator.save_state(tmp_path)
    whole.epoch()

    resumed = Run(adam, digits, our_scaler())
    resumed.accelerator.load_state(tmp_path)
    resumed.epoch()
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
