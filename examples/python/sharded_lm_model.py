# SPDX-License-Identifier: BSD-3-Clause
"""A small decoder-only language model, and how processes share it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from torchfuse.normalization import FusedRMSNorm


class Attention(nn.Module):
    """Each token looks at those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] to the same shape."""
        # The number of heads is left open: with tensor parallelism this process has a part of them.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and a pair of layers, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = FusedRMSNorm(width)
        self.attention = Attention(width, heads)
        self.norm = FusedRMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


class LanguageModel(nn.Module):
    """Tokens to logits of the tokens that follow."""

    def __init__(self, vocabulary: int, sequence: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = FusedRMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, tokens] to [N, tokens, vocabulary]."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def split_layers(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Tensor parallelism: each process of the mesh has a part of the heads and of the columns."""
    plan: dict[str, ParallelStyle] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    # Without the layouts each process would have its part of the vocabulary's logits.
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def shard(model: LanguageModel, mesh: DeviceMesh) -> FSDPModule:
    """FSDP2: each process of the mesh keeps a part of every parameter, gradient and state."""
    # Gradients are summed in fp32, over batches and over processes, whatever the parameters are.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
