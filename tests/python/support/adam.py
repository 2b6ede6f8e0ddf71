# SPDX-License-Identifier: BSD-3-Clause
"""Adam: configurations, torch's optimizers as the reference, and an fp64 oracle in plain torch."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchfuse.optimizers import FusedAdam

DEFAULT_SHAPES = ((7,), (33, 5), (128,), (3, 4, 5, 2))


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, with conversion to our optimizer and to torch's."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    adam_w_mode: bool = True

    def ours(self, params: Iterable[Any], **extra: Any) -> FusedAdam:
        return FusedAdam(
            params,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
            adam_w_mode=self.adam_w_mode,
            **extra,
        )

    def torch(self, params: Iterable[Any]) -> torch.optim.Adam:
        """The for-loop implementation: foreach and fused off."""
        kind = torch.optim.AdamW if self.adam_w_mode else torch.optim.Adam
        return kind(
            params,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
            foreach=False,
            fused=False,
        )

    def __str__(self) -> str:
        flags = [name for name in ("amsgrad", "maximize") if getattr(self, name)]
        mode = "adamw" if self.adam_w_mode else "adam"
        values = [f"lr{self.lr}", f"b{self.betas[0]}", f"wd{self.weight_decay}"]
        return "-".join([mode, *values, *flags])


def make_params(
    shapes: Sequence[Sequence[int]] = DEFAULT_SHAPES,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 1,
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(tuple(shape), generator=generator) for shape in shapes]
    return [torch.nn.Parameter(value.to(device=device, dtype=dtype)) for value in values]


def clone_params(
    params: Iterable[Tensor], dtype: torch.dtype | None = None
) -> list[torch.nn.Parameter]:
    """Copies with memory of their own, in the same layout."""
    return [torch.nn.Parameter(p.detach().clone().to(dtype=dtype or p.dtype)) for p in params]


def random_grads(params: Iterable[Tensor], seed: int, scale: float = 1.0) -> list[Tensor]:
    """Gradients of the parameters' dtype; later tensors have smaller ones, some elements are 0."""
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for index, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator) * (scale / (1 + index % 7) ** 2)
        if grad.numel() > 4:
            grad.view(-1)[3] = 0.0
        grads.append(grad.to(device=p.device, dtype=p.dtype))
    return grads


def set_grads(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Gives every parameter its own copy, converted to its dtype."""
    for p, grad in zip(params, grads, strict=True):
        p.grad = None if grad is None else grad.detach().clone().to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    """One step for every number in `steps`, which seeds its gradients (drawn in fp32)."""
    for seed in steps:
        set_grads(params, random_grads([p.detach().float() for p in params], seed))
        optimizer.step()


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved, and loaded on the CPU by torch.load's safe mode."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters in the optimizer's order, which numbers the states of a checkpoint."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def snapshot(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Copies of every parameter, gradient and state tensor, by name.

    They are numbered as in `params`, or else as in the optimizer.
    """
    copies: dict[str, Tensor] = {}
    for index, p in enumerate(params_of(optimizer) if params is None else params):
        copies[f"param[{index}]"] = p.detach().clone()
        if p.grad is not None:
            copies[f"grad[{index}]"] = p.grad.clone()
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                copies[f"{name}[{index}]"] = value.clone()
    return copies
