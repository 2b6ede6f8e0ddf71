# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face Trainer: our optimizer handed over, and as the one that it knows from apex."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from trained_alike import assert_trained_alike, make_network, weights
from transformers import Trainer, TrainingArguments

import torchfuse.apex
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

STEPS = 40
LEARNING_RATE = 1e-2
MAX_GRAD_NORM = 0.5


class Images(Dataset[dict[str, Tensor]]):
    """What a model of transformers takes: a dictionary of its arguments."""

    def __init__(self, digits: tuple[Tensor, Tensor]) -> None:
        self.images, self.labels = digits

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """What a model of transformers returns: a dictionary with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_trainer(
    digits: tuple[Tensor, Tensor], folder: Path, make_optimizer: Any = None, **options: Any
) -> Trainer:
    model = Classifier()
    optimizers: tuple[Any, Any] = (None, None)
    if make_optimizer is not None:
        optimizer = make_optimizer(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        optimizers = optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        per_device_train_batch_size=16,
        bf16=True,
        use_cpu=True,
        seed=1,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        **{"save_strategy": "no", "max_grad_norm": MAX_GRAD_NORM, **options},
    )
    return Trainer(model, arguments, train_dataset=Images(digits), optimizers=optimizers)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_the_same_training(ours: Trainer, theirs: Trainer) -> None:
    assert len(losses(ours)) == STEPS
    assert losses(ours) == pytest.approx(losses(theirs), abs=5e-3)
    assert losses(ours)[-1] < 0.8 * losses(ours)[0]
    assert_trained_alike(ours.model, theirs.model, Classifier())


@pytest.fixture
def _apex() -> Iterator[None]:
    torchfuse.apex.install()
    yield
    torchfuse.apex.uninstall()


def test_an_optimizer_that_is_handed_over(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    ours = make_trainer(digits, tmp_path, FusedAdam)
    theirs = make_trainer(digits, tmp_path, torch.optim.AdamW)
    for trainer in (ours, theirs):
        trainer.train()
    assert isinstance(ours.optimizer.optimizer, FusedAdam)
    assert_the_same_training(ours, theirs)


def test_our_scaler_in_the_trainers_accelerator(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """Trainer(fp16=True) wants a GPU; a scaler that is set works with bf16 too, and here.

    accelerate would clip scaled gradients then, so the optimizer clips. Scales are powers of 2 and
    change no bf16 gradient: the oracle trains without.
    """
    ours = make_trainer(
        digits,
        tmp_path,
        functools.partial(FusedAdam, max_grad_norm=MAX_GRAD_NORM),
        max_grad_norm=0.0,
    )
    theirs = make_trainer(digits, tmp_path, torch.optim.AdamW)
    ours.accelerator.scaler = GradScaler("cpu", growth_interval=15)
    for trainer in (ours, theirs):
        trainer.train()
    assert ours.accelerator.scaler.get_scale() == 2.0**18  # it was used: 40 steps, two growths
    assert_the_same_training(ours, theirs)


@pytest.mark.usefixtures("_apex")
def test_the_optimizer_that_the_trainer_imports_from_apex(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    ours = make_trainer(digits, tmp_path, optim="adamw_apex_fused")
    theirs = make_trainer(digits, tmp_path, optim="adamw_torch")
    for trainer in (ours, theirs):
        trainer.train()
    assert isinstance(ours.optimizer.optimizer, FusedAdam)
    assert [group["weight_decay"] for group in ours.optimizer.param_groups] == [0.01, 0.0]
    assert_the_same_training(ours, theirs)


def test_a_resumed_run_is_the_same_run(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    whole = make_trainer(digits, tmp_path, FusedAdam, save_strategy="steps", save_steps=10)
    whole.train()
    resumed = make_trainer(digits, tmp_path / "resumed", FusedAdam)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert torch.equal(weights(resumed.model), weights(whole.model))
