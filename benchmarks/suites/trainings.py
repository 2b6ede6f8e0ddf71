# SPDX-License-Identifier: BSD-3-Clause
"""Whole trainings that are compared: a model, a configuration, and the optimizer of a contender.

A contender takes over after backward: it unscales, clips and steps as its user writes it. All that
comes before is the same code on equal tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.nn.parallel import DistributedDataParallel

from suites.composites import CopiedMasters, grads_of
from suites.contenders import FUSED, LEARNING_RATE, OURS, WEIGHT_DECAY, scaled_step
from suites.workloads import Workload
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

#: Below the norm of these models' gradients, so that clipping has work to do.
MAX_NORM = 0.1
#: Each training goes through so many batches in turn.
BATCHES = 4
VERIFIED_ITERATIONS = 3
#: See `verify`. A bf16 parameter may be rounded to either side of its master. torch sums the norm
#: that it clips by in fp32, and misses that of 2 million elements by 2e-4.
TOLERANCES = {"params": 1e-4, "change": 1e-4, "exp_avg": 5e-4}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What stands between the gradients and the parameters."""

    name: str
    max_norm: float | None
    masters: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: with fp32 masters and a gradient scaler it is bf16."""
        return torch.bfloat16 if self.masters else torch.float32


CONFIGURATIONS = (
    Configuration("fp32", None, False),
    Configuration("fp32_clip", MAX_NORM, False),
    Configuration("bf16_masters_clip_scaler", MAX_NORM, True),
)


class Contender(Protocol):
    """From the gradients to new parameters."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Has the first moments."""

    @property
    def scaler(self) -> TorchGradScaler:
        """Scales the loss; off without masters."""

    def step(self) -> None:
        """Unscales, clips and steps, each if the configuration says so."""

    def values(self) -> list[Tensor]:
        """The fp32 numbers that the steps change."""


class FusedContender:
    """torchfuse: one step does it all."""

    def __init__(self, params: Sequence[nn.Parameter], configuration: Configuration) -> None:
        """`params` are the model's."""
        self.optimizer = FusedAdam(
            params,
            LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            master_weights=configuration.masters,
            max_grad_norm=configuration.max_norm,
        )
        self.scaler = GradScaler("cpu", enabled=configuration.masters)
        self._params = params

    def step(self) -> None:
        """Unscaling, clipping and masters are inside."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def values(self) -> list[Tensor]:
        """The masters, or else the parameters."""
        states = self.optimizer.state
        return [states.get(param, {}).get("master_param", param) for param in self._params]


class TorchContender:
    """torch's fused AdamW; masters are fp32 copies that it has as its parameters."""

    def __init__(self, params: Sequence[nn.Parameter], configuration: Configuration) -> None:
        """`params` are the model's."""
        self._values: list[Tensor] = list(params)
        if configuration.masters:
            self._values = [param.detach().float().requires_grad_() for param in params]
        self.optimizer = torch.optim.AdamW(
            self._values, LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.scaler = TorchGradScaler("cpu", enabled=configuration.masters)
        self._max_norm = configuration.max_norm
        self._step: Callable[[], None] = self._scaled_step
        if configuration.masters:
            self._step = CopiedMasters(params, self._values, self._scaled_step).step

    def _scaled_step(self) -> None:
        scaled_step(self.scaler, self.optimizer, self._values, self._max_norm)

    def step(self) -> None:
        """With masters: gradients are copied there before, and parameters back afterwards."""
        self._step()

    def values(self) -> list[Tensor]:
        """The masters, or else the parameters."""
        return self._values


CONTENDERS: Mapping[str, Callable[[Sequence[nn.Parameter], Configuration], Contender]] = {
    OURS: FusedContender,
    FUSED: TorchContender,
}


class Training:
    """A model that is trained by one contender, data parallel if there is a process group."""

    def __init__(
        self, workload: Workload, configuration: Configuration, contender: str, seed: int
    ) -> None:
        """Equal arguments give equal weights; each rank has data of its own."""
        torch.manual_seed(seed)
        model = workload.make().to(configuration.dtype)
        self.parameters = list(model.parameters())
        self._model: nn.Module = model
        rank = 0
        if dist.is_initialized():
            rank = dist.get_rank()
            self._model = DistributedDataParallel(model, broadcast_buffers=False)
        generator = torch.Generator().manual_seed(seed + 1 + rank)
        batches = [workload.draw(generator) for _ in range(BATCHES)]
        self._batches = itertools.cycle(
            (inputs.to(configuration.dtype) if inputs.is_floating_point() else inputs, targets)
            for inputs, targets in batches
        )
        self._contender = CONTENDERS[contender](self.parameters, configuration)
        self.step_seconds: list[float] = []

    def backward(self) -> None:
        """Forward and backward on the next batch."""
        inputs, targets = next(self._batches)
        loss = nn.functional.cross_entropy(self._model(inputs).float(), targets)
        self._contender.scaler.scale(loss).backward()

    def finish(self) -> None:
        """Everything after backward."""
        self._contender.step()
        self._model.zero_grad()

    def iterate(self) -> None:
        """One iteration; notes how long everything after backward took."""
        self.backward()
        begin = time.perf_counter()
        self.finish()
        self.step_seconds.append(time.perf_counter() - begin)

    @property
    def grads(self) -> list[Tensor]:
        """Between `backward` and `finish`."""
        return grads_of(self.parameters)

    def values(self) -> dict[str, Tensor]:
        """Parameters, masters and first moments, each as one vector; moments after a step."""
        parts: dict[str, Sequence[Tensor]] = {
            "params": self.parameters,
            "masters": self._contender.values(),
            "exp_avg": [state["exp_avg"] for state in self._contender.optimizer.state.values()],
        }
        return {
            name: torch.cat([part.detach().flatten().double() for part in tensors])
            for name, tensors in parts.items()
            if tensors
        }


def verify(trainings: Mapping[str, Training], name: str) -> dict[str, float]:
    """Compares ours with torch's after three iterations of new trainings.

    In these iterations both step with the gradients of torch's model. A model amplifies the last
    bits in which two steps differ: where a sum is near 0, ReLU and Adam turn them into much more.

    Args:
        trainings: of both contenders.
        name: of the row, for errors.

    Returns:
        The norm of the difference relative to torch's: of the parameters, of what the steps have
        changed in the masters (in the parameters where those are fp32), and of the first moments.

    Raises:
        RuntimeError: A difference is above its tolerance, so that times would mean nothing.
    """
    ours, peers = trainings[OURS], trainings[FUSED]
    start = ours.values()["params"]
    if not torch.equal(start, peers.values()["params"]):
        raise RuntimeError(f"{name}: expected equal weights before the first step")
    for _ in range(VERIFIED_ITERATIONS):
        for training in trainings.values():
            training.backward()
        torch._foreach_copy_(ours.grads, peers.grads)
        for training in trainings.values():
            training.finish()
    actual, expected = ours.values(), peers.values()
    for values in (actual, expected):
        values["change"] = values.pop("masters") - start
    differences = {}
    for key, limit in TOLERANCES.items():
        value = float((actual[key] - expected[key]).norm() / expected[key].norm())
        if not value <= limit:  # a NaN is no less
            raise RuntimeError(
                f"{name}: expected {key} of {OURS} within {limit:g} of {FUSED}'s after "
                f"{VERIFIED_ITERATIONS} iterations, got {value:g}"
            )
        differences[key] = value
    return differences
