# SPDX-License-Identifier: BSD-3-Clause
"""Lightning: our scaler in its MixedPrecision plugin, our optimizer from configure_optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trained_alike import assert_trained_alike, make_network, weights

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),
]

Factory = Callable[..., torch.optim.Optimizer]
EPOCHS = 2  # of 10 steps
LEARNING_RATE = 3e-3
# The first steps overflow in fp16, and the scale grows again later.
SCALING = {"init_scale": 2.0**21, "growth_interval": 8}


class Module(pl.LightningModule):
    """A classifier that trains with any optimizer."""

    def __init__(self, factory: Factory, **options: Any) -> None:
        super().__init__()
        self.network = make_network()
        self.factory, self.options = factory, options

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.factory(self.parameters(), lr=LEARNING_RATE, **self.options)


def fit(
    module: Module,
    digits: tuple[Tensor, Tensor],
    folder: Path,
    epochs: int = EPOCHS,
    resume: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    loader = DataLoader(TensorDataset(*digits), batch_size=32)
    trainer.fit(module, loader, ckpt_path=resume)
    assert trainer.global_step == 10 * epochs
    return trainer


def fp16(scaler: Any) -> MixedPrecision:
    # Trainer(precision="16-mixed") would take bf16 on a CPU; the plugin itself takes fp16.
    return MixedPrecision("16-mixed", "cpu", scaler)


@pytest.fixture(scope="module")
def reference(
    digits: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Module, torch.amp.GradScaler]:
    module, scaler = Module(torch.optim.AdamW), torch.amp.GradScaler("cpu", **SCALING)
    fit(module, digits, tmp_path_factory.mktemp("reference"), plugins=[fp16(scaler)])
    return module, scaler


@pytest.mark.parametrize("factory", [FusedAdam, torch.optim.AdamW])
@pytest.mark.parametrize("scaler_type", [GradScaler, torch.amp.GradScaler])
def test_fp16_with_our_optimizer_our_scaler_and_both(
    factory: Factory,
    scaler_type: type[torch.amp.GradScaler],
    reference: tuple[Module, torch.amp.GradScaler],
    digits: tuple[Tensor, Tensor],
    tmp_path: Path,
) -> None:
    options = {"weight_decay": 0.01}
    module, scaler = Module(factory, **options), scaler_type("cpu", **SCALING)
    fit(module, digits, tmp_path, plugins=[fp16(scaler)])
    theirs, their_scaler = reference
    assert_trained_alike(module.network, theirs.network, make_network())
    assert scaler.state_dict() == their_scaler.state_dict()
    assert scaler.get_scale() < SCALING["init_scale"]  # steps were skipped on the way


def test_clipping_is_asked_of_the_optimizer(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    ours = Module(FusedAdam, weight_decay=0.01, max_grad_norm=0.1)
    fit(ours, digits, tmp_path, plugins=[fp16(GradScaler("cpu"))])
    theirs = Module(torch.optim.AdamW)
    plugin = fp16(torch.amp.GradScaler("cpu"))
    fit(theirs, digits, tmp_path, plugins=[plugin], gradient_clip_val=0.1)
    assert_trained_alike(ours.network, theirs.network, make_network())


def test_lightning_refuses_to_clip_what_the_optimizer_unscales(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    """As it does for torch's own fused optimizers; hence max_grad_norm."""
    for module in (Module(FusedAdam), Module(torch.optim.AdamW, fused=True)):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(module, digits, tmp_path, plugins=[fp16(GradScaler("cpu"))], gradient_clip_val=0.1)


def test_a_resumed_run_is_the_same_run(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    whole, scaler = Module(FusedAdam), GradScaler("cpu", **SCALING)
    fit(whole, digits, tmp_path, plugins=[fp16(scaler)])

    first = Module(FusedAdam)
    trainer = fit(first, digits, tmp_path, 1, plugins=[fp16(GradScaler("cpu", **SCALING))])
    checkpoint = tmp_path / "checkpoint.ckpt"
    trainer.save_checkpoint(checkpoint)
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["MixedPrecision"] == trainer.precision_plugin.scaler.state_dict()

    resumed, new_scaler = Module(FusedAdam), GradScaler("cpu", **SCALING)
    fit(resumed, digits, tmp_path, resume=checkpoint, plugins=[fp16(new_scaler)])
    assert torch.equal(weights(resumed), weights(whole))
    assert new_scaler.state_dict() == scaler.state_dict()
