# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer steps to compare, torchfuse's and others', as users write the steps.

All contenders in a case get identical tensors. Before timing, each contender performs three steps
with a realistic loss scale and active clipping. The results must agree with the first contender's
results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from suites.parameters import ParameterSet
from torchfuse.amp import GradScaler

OURS = "torchfuse"
FUSED = "torch fused"
FOREACH = "torch foreach"
DEFAULT = "torch default"  # AdamW() as written: a loop over the tensors on a CPU
AGAIN = "torch fused, again"

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SCALE = 65536.0
STEPS = 3
#: Maximum relative difference in norm, by dtype. torch rounds to bf16 after every operation.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float64: 1e-13}

#: Creates an optimizer from parameters and the maximum gradient norm (None: no clipping).
Make = Callable[[list[Tensor], float | None], Any]


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer, and how the optimizer's step handles scaling, clipping and masters.

    Attributes:
        name: Name in results.
        make: Creates the optimizer.
        ours: The step itself unscales, clips and keeps fp32 masters of 16-bit parameters.
        clips: The optimizer itself clips by the norm passed to `make`.
        scaled: Use a gradient scaler in cases with loss scaling.
    """

    name: str
    make: Make
    ours: bool = False
    clips: bool = False
    scaled: bool = True


def ours(kind: Any, name: str = OURS, **options: Any) -> Contender:
    """Returns a contender for a torchfuse optimizer, which clips within the step."""
    options = {"lr": LEARNING_RATE, **options}

    def make(params: list[Tensor], max_norm: float | None) -> Any:
        return kind(params, max_grad_norm=max_norm, **options)

    return Contender(name, make, ours=True)


def theirs(name: str, kind: Any, **options: Any) -> Contender:
    """Returns a contender for an optimizer with torch's interface."""
    options = {"lr": LEARNING_RATE, **options}
    return Contender(name, lambda params, _: kind(params, **options))


class Step:
    """One contender's step, including unscaling and clipping.

    Timed steps use a loss scale of 1 and a gradient norm below the limit, because torch's unscaling
    and clipping modify gradients in place, so gradients would shrink with every step. The amount of
    work is the same.
    """

    def __init__(
        self,
        contender: Contender,
        params: Sequence[Tensor],
        *,
        max_norm: float | None = None,
        scales: bool = False,
        masters: bool = False,
    ) -> None:
        """With `masters`, an optimizer that is not ours gets fp32 copies of the parameters."""
        self.params = list(params)
        copies = masters and not contender.ours
        self._values = [p.detach().float().requires_grad_() for p in params] if copies else params
        self.optimizer = contender.make(list(self._values), max_norm)
        self.scaler: TorchGradScaler | None = None
        if scales and contender.scaled:
            device = params[0].device
            scaler = GradScaler if contender.ours else TorchGradScaler
            self.scaler = scaler(device.type, init_scale=SCALE)
            self.scaler.scale(torch.zeros((), device=device))
        self._limit = None if contender.ours or contender.clips else max_norm
        #: Clip by an fp64 norm. torch's fp32 norm is off by 0.5 % for a tensor with 2^26 elements,
        #: which is too inaccurate for verification.
        self.exact_norm = False
        self.run: Callable[[], object] = self._run
        if copies:
            for value in self._values:
                value.grad = torch.empty_like(value)
            self.run = self._run_on_copies
        elif self.scaler is None and self._limit is None:
            self.run = self.optimizer.step

    def _run(self) -> None:
        if self._limit is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self.exact_norm:
                norm = fp64_norm(grads_of(self._values))
                torch.nn.utils.clip_grads_with_norm_(self._values, self._limit, norm)
            else:
                torch.nn.utils.clip_grad_norm_(self._values, self._limit)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    @torch.no_grad()
    def _run_on_copies(self) -> None:
        torch._foreach_copy_(grads_of(self._values), grads_of(self.params))
        self._run()
        torch._foreach_copy_(self.params, list(self._values))

    def values(self) -> list[Tensor]:
        """Returns the values that steps update: masters if they exist, otherwise parameters."""
        states = getattr(self.optimizer, "state", {})
        return [states.get(value, {}).get("master_param", value) for value in self._values]

    def moments(self) -> list[Tensor]:
        """Returns Adam's first moments; an empty list for other optimizers."""
        states = getattr(self.optimizer, "state", {})
        found = [states.get(value, {}).get("exp_avg") for value in self._values]
        return [moment for moment in found if moment is not None]


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients that exist."""
    return [param.grad for param in params if param.grad is not None]


def fp64_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the norm over all tensors, computed in fp64."""
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()


def largest_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the maximum relative difference in norm over all pairs; NaN if any is NaN."""

    def wide(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local.detach().to(torch.promote_types(tensor.dtype, torch.float32))

    pairs = [(wide(a), wide(b)) for a, b in zip(actual, expected, strict=True)]
    errors = torch.stack([(a - b).norm() for a, b in pairs])
    norms = torch.stack([b.norm() for _, b in pairs])
    return float(torch.where(errors == 0, errors, errors / norms).max())


def _same(value: Tensor) -> Tensor:
    return value


@dataclasses.dataclass(frozen=True)
class StepCase:
    """One row: steps on one parameter set. The first contender is the subject.

    Attributes:
        name: Name for --only and the table.
        parameters: Parameter set.
        contenders: The subject, then the peers.
        bytes_per_element: Minimum bytes to read and write. Gradients count twice if a norm or check
            must precede the step.
        dtype: Dtype of parameters and gradients without masters.
        scales: Use loss scaling.
        clips: Clip by the global norm.
        masters: Use bf16 parameters and gradients with fp32 masters.
        tolerance: Maximum relative difference between parameters and between first moments. None:
            the dtype's tolerance.
        place: Converts each tensor, for example to a DTensor.
    """

    name: str
    parameters: ParameterSet
    contenders: tuple[Contender, ...]
    bytes_per_element: float
    dtype: torch.dtype = torch.float32
    scales: bool = False
    clips: bool = False
    masters: bool = False
    tolerance: float | None = None
    place: Callable[[Tensor], Tensor] = _same

    @property
    def subject(self) -> str:
        """Name of the contender by whose time the peers' times are divided."""
        return self.contenders[0].name

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the other contenders."""
        return tuple(contender.name for contender in self.contenders[1:])

    def prepare(self, device: torch.device, seed: int) -> Mapping[str, Callable[[], object]]:
        """Builds the contenders, and verifies their results, so that times are comparable."""
        steps = {c.name: self._step(c, device, seed) for c in self.contenders}
        for name, step in steps.items():
            self._verification_steps(name, step, seed)
        limit = TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance
        first = steps[self.subject]
        for name, step in steps.items():
            differences = {"parameters": largest_difference(step.values(), first.values())}
            if first.moments() and step.moments():
                moments = largest_difference(step.moments(), first.moments())
                differences["first moments"] = moments
            for what, found in differences.items():
                if not found <= limit:
                    raise RuntimeError(
                        f"{self.name}: expected {what} of {name} within {limit:g} of "
                        f"{self.subject}'s after {STEPS} steps, got {found:g}"
                    )
        for step in steps.values():
            self._prepare_timing(step, seed)
        return {name: step.run for name, step in steps.items()}

    def _step(self, contender: Contender, device: torch.device, seed: int) -> Step:
        dtype = torch.bfloat16 if self.masters else self.dtype
        params: list[Tensor] = [
            torch.nn.Parameter(self.place(value.mul_(0.1)))
            for value in self.parameters.randn(dtype, device, seed)
        ]
        grads = self.parameters.empty(dtype, device)
        for param, grad in zip(params, grads, strict=True):
            param.grad = self.place(grad)
        # For any seed, the norm of standard normal gradients is close to sqrt(numel).
        max_norm = math.sqrt(self.parameters.numel) if self.clips else None
        step = Step(contender, params, max_norm=max_norm, scales=self.scales, masters=self.masters)
        self._fill_grads(step, seed, 1.0)
        return step

    @torch.no_grad()
    def _fill_grads(self, step: Step, seed: int, factor: float) -> None:
        """Refills gradients before each compared step, because some optimizers modify gradients."""
        factor = 0.0 if self.parameters.zero_grads else factor
        grads = grads_of(step.params)
        values = self.parameters.randn(grads[0].dtype, grads[0].device, seed + 1)
        for grad, value in zip(grads, values, strict=True):
            grad.copy_(self.place(value.mul_(factor)))

    def _verification_steps(self, name: str, step: Step, seed: int) -> None:
        step.exact_norm = True
        factor = 2.0 * (1.0 if step.scaler is None else SCALE)
        for _ in range(STEPS):
            self._fill_grads(step, seed, factor)
            step.run()
        if step.scaler is not None:
            before = [value.clone() for value in step.values()]
            grads_of(step.params)[0].view(-1)[0] = math.inf
            step.run()
            if not all(map(torch.equal, before, step.values())):
                raise RuntimeError(
                    f"{self.name}: expected {name} to skip a step with an infinite gradient, but "
                    "its parameters changed"
                )
        step.exact_norm = False

    def _prepare_timing(self, step: Step, seed: int) -> None:
        self._fill_grads(step, seed, 0.5)
        if step.scaler is not None:
            step.scaler.update(1.0)
        for param in step.params:
            for key, value in self.parameters.moments.items():
                step.optimizer.state[param][key].fill_(value)
