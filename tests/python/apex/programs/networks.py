# SPDX-License-Identifier: BSD-3-Clause
"""Small models and data of the programs, in plain torch; the tests train the same."""

import torch
from torch import nn

WORDS, MASK = 13, 12


class Block(nn.Module):
    """One layer of a transformer, normalized first."""

    def __init__(self, width, norm):
        super().__init__()
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        query, key, value = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        x = x + self.out(scores.softmax(dim=-1) @ value)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class TinyBert(nn.Module):
    """Predicts masked words."""

    def __init__(self, norm=nn.LayerNorm, width=32, length=12):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, norm), Block(width, norm))
        self.norm, self.head = norm(width), nn.Linear(width, WORDS)

    def forward(self, words):
        places = torch.arange(words.shape[1], device=words.device)
        return self.head(self.norm(self.blocks(self.words(words) + self.places(places))))


def sentences(count, length=12):
    """Masked sentences, which run forwards or backwards, and what was masked (-100 elsewhere)."""
    generator = torch.Generator().manual_seed(11)
    first = torch.randint(WORDS - 1, (count, 1), generator=generator)
    forwards = torch.randint(2, (count,), generator=generator)
    way = torch.arange(length) * (2 * forwards[:, None] - 1)
    words = (first + way) % (WORDS - 1)
    masked = torch.rand(words.shape, generator=generator) < 0.2
    return words.masked_fill(masked, MASK), words.masked_fill(~masked, -100)


def bert_loss(words, labels):
    """The loss of masked words, in fp32."""
    return nn.functional.cross_entropy(words.float().flatten(0, 1), labels.flatten())


class TinyResNet(nn.Module):
    """A convolution, a residual block and a linear layer, with batch normalization."""

    def __init__(self, classes=4, width=8):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.last = nn.Linear(width, classes)

    def forward(self, images):
        x = self.norms[0](self.first(images)).relu()
        x = (x + self.norms[1](self.second(x))).relu()
        return self.last(x.mean(dim=(2, 3)))


def pictures(count, classes=4):
    """Noise with a class's brightness by channel; the first half of every 16 is brighter."""
    generator = torch.Generator().manual_seed(12)
    labels = torch.randint(classes, (count,), generator=generator)
    images = torch.randn(count, 3, 6, 6, generator=generator)
    colors = torch.randn(classes, 3, 1, 1, generator=generator)
    brighter = (torch.arange(count) % 16 < 8).float().view(-1, 1, 1, 1)
    return images + colors[labels] + 1.5 * brighter, labels
