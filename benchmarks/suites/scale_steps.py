# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer steps for benchmarks/scale.py: of many small tensors, and of one tensor of any size.

All contenders of a point step the same parameters with the same gradients and moments: what memory
they have decides their time, and the largest sets fit once only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from suites.contenders import FOREACH, FUSED, LEARNING_RATE, OURS, WEIGHT_DECAY, difference
from torchfuse.optimizers import FusedAdam, FusedSGD

Step = Callable[[], object]
Parameters = list[torch.nn.Parameter]
#: Of each small tensor.
SMALL = 64
#: Random values are drawn once for so many elements, and repeated: drawing takes longer than steps.
BLOCK = 2**16
#: What a process needs beside its tensors: Python objects of a tensor and its states, torch itself.
OBJECTS = 8192
MARGIN = 512 * 2**20
#: Of the change, relative, in norm. A learning rate that is 0.1 % off is seen in fp32.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-7}


@dataclasses.dataclass(frozen=True)
class Curve:
    """Steps of one optimizer and dtype, of `tensors` tensors or of one of `elements` elements."""

    name: str
    dtype: torch.dtype
    has_moments: bool
    contenders: tuple[str, ...]

    def needed_bytes(self, tensors: int, numel: int) -> int:
        """Memory for parameters, gradients and moments; no contender makes temporary copies."""
        states = 4 if self.has_moments else 2
        return states * self.dtype.itemsize * tensors * numel + OBJECTS * tensors + MARGIN

    def bytes_moved(self) -> int:
        """Of an element, that a step must read and write."""
        return (7 if self.has_moments else 3) * self.dtype.itemsize


ADAM = Curve("adam_float32", torch.float32, True, (OURS, FUSED))
ADAM_TENSORS = dataclasses.replace(ADAM, contenders=(OURS, FUSED, FOREACH))
# torch 2.11's fused SGD leaves 16-bit parameters on a CPU as they are, but for a tail of fewer than
# 16 elements: it cannot be the peer.
SGD = Curve("sgd_bfloat16", torch.bfloat16, False, (OURS, FOREACH))


def filled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Writes normal values, those of one block again and again."""
    flat = tensor.view(-1)
    block = torch.randn(min(BLOCK, flat.numel()), generator=generator).to(tensor.dtype)
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel()).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
    return tensor


def parameters_of(curve: Curve, tensors: int, numel: int, seed: int) -> Parameters:
    """Parameters with gradients; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for _ in range(tensors):
        values = filled(torch.empty(numel, dtype=curve.dtype), generator)
        param = torch.nn.Parameter(values.mul_(0.01))  # small enough for a step to change them
        param.grad = filled(torch.empty_like(param), generator)
        params.append(param)
    return params


def make(curve: Curve, contender: str, params: Parameters) -> torch.optim.Optimizer:
    """One contender's optimizer."""
    if contender == OURS and curve.has_moments:
        return FusedAdam(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    if contender == OURS:
        return FusedSGD(params, lr=LEARNING_RATE)
    fused, foreach = (True if contender == kind else None for kind in (FUSED, FOREACH))
    if curve.has_moments:
        return torch.optim.AdamW(
            params,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            fused=fused,
            foreach=foreach,
        )
    return torch.optim.SGD(params, lr=LEARNING_RATE, fused=fused, foreach=foreach)


def verify(curve: Curve, tensors: int, numel: int, seed: int) -> float:
    """Compares three steps of every contender from equal parameters with those of torch.

    Returns:
        The largest relative difference of what the steps changed.

    Raises:
        RuntimeError: a contender computes something else, so that timing it would be void.
    """
    changes: dict[str, list[torch.Tensor]] = {}
    for name in curve.contenders:
        params = parameters_of(curve, tensors, numel, seed)
        before = [param.detach().clone() for param in params]
        optimizer = make(curve, name, params)
        for _ in range(3):
            optimizer.step()
        changes[name] = [param.detach() - old for param, old in zip(params, before, strict=True)]
    largest = 0.0
    reference = curve.contenders[1]
    for name in curve.contenders:
        pairs = zip(changes[name], changes[reference], strict=True)
        for index, (change, expected) in enumerate(pairs):
            found = difference(change, expected) if bool(expected.any()) else math.nan
            if not found <= TOLERANCES[curve.dtype]:
                raise RuntimeError(
                    f"{curve.name}, {name}: expected the change of parameter {index} within "
                    f"{TOLERANCES[curve.dtype]:g} of {reference}'s, got {found:g}"
                )
            largest = max(largest, found)
    return largest


def steps(curve: Curve, params: Parameters) -> dict[str, Step]:
    """The contenders' steps, all of these parameters and of the same moments."""
    made = {name: make(curve, name, params) for name in curve.contenders}
    made[OURS].step()
    if curve.has_moments:
        share_moments(made[OURS], [made[name] for name in curve.contenders if name != OURS], params)
    return {name: optimizer.step for name, optimizer in made.items()}


def share_moments(
    ours: torch.optim.Optimizer, others: Sequence[torch.optim.Optimizer], params: Parameters
) -> None:
    """Lets torch's optimizers use our moments, before they allocate their own."""
    for param in params:
        moments = {key: ours.state[param][key] for key in ("exp_avg", "exp_avg_sq")}
        for other in others:
            other.state[param] = {"step": torch.ones(()), **moments}
