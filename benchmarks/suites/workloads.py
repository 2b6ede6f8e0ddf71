# SPDX-License-Identifier: BSD-3-Clause
"""Models and data for benchmarks/end_to_end.py: a language model and a residual network.

All layers are torch's, so trainings differ in the optimizer only. The data is random with a fixed
seed, because only the training time matters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

#: Inputs and targets.
Batch = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """A transformer encoder that predicts the next token at each position."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        """Four heads, no dropout; every sequence has `length` tokens."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [N, length] to logits [N * length, vocabulary]."""
        hidden = self.tokens(tokens) + self.positions
        hidden = self.encoder(hidden, self.get_buffer("mask"), is_causal=True)
        logits: Tensor = self.head(hidden.flatten(0, 1))
        return logits


class Block(nn.Module):
    """A residual block with two convolutions; stride 2 halves height and width."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Maps `before` channels to `after` channels."""
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [N, before, H, W] to [N, after, H / stride, W / stride]."""
        total: Tensor = self.convolutions(images) + self.around(images)
        return total.relu()


def residual_network(width: int, blocks: int) -> nn.Sequential:
    """Returns three stages of `blocks` blocks each, with `width`, 2 and 4 times the channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
    layers.append(nn.ReLU())
    before = width
    for stage in range(3):
        for index in range(blocks):
            after = width * 2**stage
            layers.append(Block(before, after, 2 if stage > 0 and index == 0 else 1))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def token_batch(sequences: int, length: int, vocabulary: int, generator: torch.Generator) -> Batch:
    """Returns random token sequences, and each token's successor as the target."""
    tokens = torch.randint(vocabulary, (sequences, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


def image_batch(images: int, generator: torch.Generator) -> Batch:
    """Returns random 32x32 images in 10 classes."""
    return (
        torch.randn(images, 3, 32, 32, generator=generator),
        torch.randint(10, (images,), generator=generator),
    )


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its batches."""

    name: str
    batch: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]


def _transformer(vocabulary: int, width: int, sequences: int, length: int) -> Workload:
    return Workload(
        "transformer",
        f"{sequences} sequences of {length} tokens",
        lambda: LanguageModel(vocabulary, width, layers=2, length=length),
        lambda generator: token_batch(sequences, length, vocabulary, generator),
    )


def _resnet(width: int, blocks: int, images: int) -> Workload:
    return Workload(
        "resnet",
        f"{images} images",
        lambda: residual_network(width, blocks),
        lambda generator: image_batch(images, generator),
    )


WORKLOADS = (_transformer(8000, 256, 8, 64), _resnet(32, 2, 32))
#: Small workloads with the same names, for --quick.
QUICK_WORKLOADS = (_transformer(100, 16, 2, 8), _resnet(4, 1, 2))
