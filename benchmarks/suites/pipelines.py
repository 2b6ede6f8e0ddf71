# SPDX-License-Identifier: BSD-3-Clause
"""What torchfuse and torch do between backward and the next iteration, in one memory.

All contenders of a case work on the same parameters, gradients and states, one after another. So
large models fit, and nobody has better pages or caches than another.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from suites.composites import CopiedMasters
from suites.contenders import LEARNING_RATE, WEIGHT_DECAY
from suites.parameters import ParameterSet
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

Norm = Callable[[Sequence[Tensor]], Tensor]


class Scenario(NamedTuple):
    """What is done beside the step: loss scaling with check and skip, clipping by global norm."""

    name: str
    scales: bool
    clips: bool


SCENARIOS = (
    Scenario("s0", scales=False, clips=False),
    Scenario("s1", scales=True, clips=False),
    Scenario("s2", scales=False, clips=True),
    Scenario("s3", scales=True, clips=True),
)


def fp64_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm to verify with: torch's own in fp32 is up to 0.5 % off for large tensors."""
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()


@dataclasses.dataclass(frozen=True)
class Memory:
    """The tensors that the contenders of a case share.

    `masters` are the parameters themselves where these are fp32. `wide_grads` are fp32 copies of
    16-bit gradients for contenders that make such copies, and the gradients themselves in fp32.
    """

    params: list[Tensor]
    grads: list[Tensor]
    masters: list[Tensor]
    wide_grads: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    max_norm: float

    @classmethod
    def of(cls, parameters: ParameterSet, masters: bool, device: torch.device) -> Memory:
        """Allocates all of it, in bf16 with fp32 masters or in fp32."""
        dtype = torch.bfloat16 if masters else torch.float32
        params, grads = (parameters.empty(dtype, device) for _ in range(2))
        wide = [parameters.empty(torch.float32, device) for _ in range(4 if masters else 2)]
        # The norm of standard normal gradients is close to sqrt(numel).
        norm = float(parameters.numel) ** 0.5
        own, copies = wide[2:] if masters else [params, grads]
        return cls(params, grads, own, copies, wide[0], wide[1], max_norm=norm)

    def reset(self, values: Sequence[Tensor]) -> None:
        """Parameters with these values, and moments of zero."""
        torch._foreach_copy_(self.masters, list(values))
        if self.params is not self.masters:
            torch._foreach_copy_(self.params, list(values))
        torch._foreach_zero_(self.means)
        torch._foreach_zero_(self.squares)

    def fill_grads(self, values: Sequence[Tensor], factor: float) -> None:
        """Gradients with these values times `factor`."""
        torch._foreach_copy_(self.grads, list(values))
        torch._foreach_mul_(self.grads, factor)

    def parameters(self) -> list[Tensor]:
        """Parameters for an optimizer, with their gradients, in this memory."""
        return _with_grads(self.params, self.grads)

    def master_parameters(self) -> list[Tensor]:
        """The same of the fp32 masters, for an optimizer that knows no others."""
        return _with_grads(self.masters, self.wide_grads)


def _with_grads(values: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    # With .data each has a version of its own. FusedAdam would take what another contender wrote
    # for a change by the user, and carry it to the masters.
    params: list[Tensor] = [torch.nn.Parameter(value.data) for value in values]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


class Pipeline(abc.ABC):
    """A contender.

    Attributes:
        skips: whether a step with a non-finite gradient changes nothing, where it scales.
    """

    skips = True

    def __init__(self, memory: Memory, scenario: Scenario, scale: float) -> None:
        """Works in this memory, on gradients that are multiplied by `scale` if it scales."""
        self.memory = memory
        self.scenario = scenario
        self.max_norm = memory.max_norm if scenario.clips else None
        self.norm: Norm | None = None

    @abc.abstractmethod
    def step(self) -> None:
        """One step of the scenario; clips by `norm`, if that is set, or by its own."""

    @abc.abstractmethod
    def set_scale(self, scale: float) -> None:
        """From now on gradients are multiplied by this."""

    @abc.abstractmethod
    def move_states(self) -> None:
        """Moves states that a first step allocated to the common memory."""


class _Optimizer(Pipeline):
    """A pipeline around a torch.optim.Optimizer and, if it scales, a GradScaler."""

    def __init__(
        self,
        memory: Memory,
        scenario: Scenario,
        scale: float,
        params: list[Tensor],
        optimizer: torch.optim.Optimizer,
        scaler: type[TorchGradScaler],
    ) -> None:
        super().__init__(memory, scenario, scale)
        self._params = params
        self._optimizer = optimizer
        self._scaler: TorchGradScaler | None = None
        if scenario.scales:
            device = params[0].device
            self._scaler = scaler(device.type, init_scale=scale)
            self._scaler.scale(torch.zeros((), device=device))

    def set_scale(self, scale: float) -> None:
        if self._scaler is not None:
            self._scaler.update(scale)

    def move_states(self) -> None:
        for index, param in enumerate(self._params):
            state = self._optimizer.state[param]
            for key, values in (
                ("exp_avg", self.memory.means),
                ("exp_avg_sq", self.memory.squares),
                ("master_param", self.memory.masters),
            ):
                if key in state:
                    values[index].copy_(state[key])
                    state[key].data = values[index]


class Ours(_Optimizer):
    """FusedAdam, which unscales and clips within the step."""

    def __init__(self, memory: Memory, scenario: Scenario, scale: float) -> None:
        """With masters where the memory has some."""
        params = memory.parameters()
        optimizer = FusedAdam(
            params,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=memory.max_norm if scenario.clips else None,
            master_weights=memory.masters is not memory.params,
        )
        super().__init__(memory, scenario, scale, params, optimizer, GradScaler)

    def step(self) -> None:
        """One call of the optimizer, or of the scaler."""
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()


class Theirs(_Optimizer):
    """An optimizer of torch's interface with torch's scaler and clip_grad_norm_.

    Of 16-bit parameters it knows nothing: gradients are copied to fp32, and masters back.
    """

    def __init__(
        self, memory: Memory, scenario: Scenario, scale: float, kind: Any, **options: Any
    ) -> None:
        """`kind` is the class, and `options` what differs from its defaults."""
        params = memory.master_parameters()
        options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, **options}
        super().__init__(memory, scenario, scale, params, kind(params, **options), TorchGradScaler)
        self._step = self._step_of_masters
        if memory.masters is not memory.params:
            copied = CopiedMasters(memory.parameters(), params, self._step_of_masters)
            self._step = copied.step

    def step(self) -> None:
        """As users of torch write it."""
        self._step()

    def _step_of_masters(self) -> None:
        if self._scaler is not None and self.max_norm is not None:
            self._scaler.unscale_(self._optimizer)
        if self.max_norm is not None and self.norm is not None:
            norm = self.norm(self.memory.wide_grads)
            torch.nn.utils.clip_grads_with_norm_(self._params, self.max_norm, norm)
        elif self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self.max_norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
