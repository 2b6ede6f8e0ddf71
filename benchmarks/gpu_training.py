# SPDX-License-Identifier: BSD-3-Clause
"""Trains a ResNet-50 and a language model on a GPU, with torchfuse and with torch.

Both trainings start from the same weights and use the same batches. The losses must agree.
Otherwise the times are not comparable.

- ResNet-50, 64 images, fp16 autocast: `GradScaler` and `FusedSGD`, also captured in a CUDA graph,
  against torch's scaler and fused SGD.
- 12 layers, 8 x 512 tokens, bf16 autocast: `FusedAdam` with clipping, `FusedLayerNorm` and
  `softmax_cross_entropy`, against torch's fused AdamW, `clip_grad_norm_` and layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from suites.workloads import Batch, LanguageModel, token_batch
from torchfuse.amp import GradScaler
from torchfuse.losses import softmax_cross_entropy
from torchfuse.normalization import FusedLayerNorm
from torchfuse.optimizers import FusedAdam, FusedSGD

DEVICE = torch.device("cuda")
OURS, THEIRS, GRAPH = "torchfuse", "torch", "torchfuse, graph"
BATCHES = 4
#: Maximum relative difference between the two losses in an iteration.
TOLERANCE = 0.02
MAX_NORM = 1.0


@dataclasses.dataclass
class Training:
    """A model with loss, loss scaling and optimizer step."""

    model: nn.Module
    loss_of: Callable[[Batch], Tensor]
    scale: Callable[[Tensor], Tensor]
    step: Callable[[], None]

    def backward(self, batch: Batch) -> Tensor:
        """Runs forward and backward; returns the loss."""
        loss = self.loss_of(batch)
        self.scale(loss).backward()
        return loss.detach()

    def iterate(self, batch: Batch) -> Tensor:
        """Runs one iteration; returns the loss."""
        loss = self.backward(batch)
        self.step()
        return loss


def _resnet(ours: bool, small: bool) -> Training:
    torch.manual_seed(0)
    make = torchvision.models.resnet18 if small else torchvision.models.resnet50
    model = make().to(DEVICE, memory_format=torch.channels_last)
    options: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
    optimizer: torch.optim.Optimizer
    if ours:
        optimizer = FusedSGD(model.parameters(), **options)
        optimizer.make_capturable()
    else:
        optimizer = torch.optim.SGD(model.parameters(), fused=True, **options)
    scaler = (GradScaler if ours else TorchGradScaler)("cuda", init_scale=1024.0)

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Training(model, loss_of, scaler.scale, step)


def _language_model(ours: bool, small: bool) -> Training:
    torch.manual_seed(0)
    model = LanguageModel(*((101, 16, 2, 8) if small else (50257, 768, 12, 512))).to(DEVICE)
    if ours:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.LayerNorm):
                    layer = FusedLayerNorm(child.normalized_shape, child.eps, device=DEVICE)
                    layer.load_state_dict(child.state_dict())
                    setattr(module, name, layer)
    params = list(model.parameters())
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    optimizer: torch.optim.Optimizer
    if ours:
        optimizer = FusedAdam(params, max_grad_norm=MAX_NORM, **options)
    else:
        optimizer = torch.optim.AdamW(params, fused=True, **options)

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(batch[0])
            if ours:
                return softmax_cross_entropy(logits, batch[1]).float().mean()
            return nn.functional.cross_entropy(logits, batch[1])

    def step() -> None:
        if not ours:
            nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, loss_of, lambda loss: loss, step)


def _images(small: bool) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    count, size = (4, 32) if small else (64, 224)
    return [
        (
            torch.randn(count, 3, size, size, generator=random)
            .to(DEVICE)
            .contiguous(memory_format=torch.channels_last),
            torch.randint(1000, (count,), generator=random).to(DEVICE),
        )
        for _ in range(BATCHES)
    ]


def _tokens(small: bool) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    shape = (2, 8, 101) if small else (8, 512, 50257)
    batches = [token_batch(*shape, random) for _ in range(BATCHES)]
    return [(inputs.to(DEVICE), targets.to(DEVICE)) for inputs, targets in batches]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _eager(training: Training, batches: list[Batch], count: int) -> tuple[list[float], Any]:
    """Returns losses, and median times for an iteration and for everything after backward."""
    losses, events = [], []
    for index in range(count):
        begin = _event()
        losses.append(training.backward(batches[index % len(batches)]))
        between = _event()
        training.step()
        events.append((begin, between, _event()))
    torch.cuda.synchronize()
    later = events[count // 3 :]
    return [float(loss) for loss in losses], {
        "ms": statistics.median(begin.elapsed_time(end) for begin, _, end in later),
        "step_ms": statistics.median(between.elapsed_time(end) for _, between, end in later),
        "peak_mib": torch.cuda.max_memory_allocated() // 2**20,
    }


def _replayed(training: Training, batch: Batch, count: int) -> dict[str, float]:
    """Times replays of a captured iteration on one batch; the loss must fall."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.iterate(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.iterate(batch)
    graph.replay()
    first = float(loss)
    times = []
    for _ in range(count):
        begin = _event()
        graph.replay()
        times.append((begin, _event()))
    last = float(loss)
    if not last < first:
        raise RuntimeError(f"{GRAPH}: expected a loss below {first:g}, got {last:g}")
    return {"ms": statistics.median(begin.elapsed_time(end) for begin, end in times)}


def main() -> int:
    """Trains the models, compares losses and writes figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="small models, three iterations")
    options = parser.parse_args()
    small, count = options.small, 3 if options.small else 30
    figures: dict[str, Any] = {}
    failed = False
    for name, make, draw in (
        ("resnet50_fp16", _resnet, _images),
        ("gpt_12_layers_bf16", _language_model, _tokens),
    ):
        batches = draw(small)
        losses, row = {}, {}
        for side in (OURS, THEIRS):
            torch.cuda.reset_peak_memory_stats()
            losses[side], row[side] = _eager(make(side == OURS, small), batches, count)
        if name.startswith("resnet"):
            row[GRAPH] = _replayed(make(True, small), batches[0], count)
        pairs = zip(losses[OURS], losses[THEIRS], strict=True)
        row["loss_difference"] = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
        row["last_loss"] = losses[OURS][-1]
        figures[name] = row
        if not row["loss_difference"] <= TOLERANCE:
            print(f"{name}: expected losses within {TOLERANCE}, got {losses}", file=sys.stderr)
            failed = True
        options.out.write_text(json.dumps(figures), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
