# SPDX-License-Identifier: BSD-3-Clause
"""The steps of other packages and of torch.compile.

`make bench-peers` installs DeepSpeed, bitsandbytes and torchao beside the development environment
and runs this suite. A peer that cannot be imported or built is reported with its error, and no row
has its name. Peers keep fp32 states, so that they move the same bytes. Those that keep 8-bit states
are no peers: they appear with their bytes and their distance from ours, and without a ratio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from suites.contenders import AGAIN, FUSED, LEARNING_RATE, OURS, difference
from suites.fused_adam import Other, Prepared
from suites.packages import BITSANDBYTES, COMPILED, DEEPSPEED, TORCHAO, class_of, usable
from suites.parameters import ParameterSet, load
from torchfuse import optimizers

QUICK_NUMEL = 30_000_000
#: Relative difference in norm of the parameters from ours after three steps.
TOLERANCE = 5e-6
MEMORY_CASES = ()
#: Peers that could not be made, and why.
MISSING: dict[str, str] = {}

Make = Callable[[list[Tensor]], Any]


class CompiledStep:
    """torch's optimizer, whose whole step is one function of torch.compile."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes an optimizer that torch can compile."""
        self._optimizer = optimizer
        self._step = torch.compile(optimizer.step)

    def step(self) -> None:
        """One step."""
        self._step()


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: one optimizer in fp32, without scaling and clipping.

    `bytes_per_element` counts each stream that is read, and each that is written, once. `others`
    are contenders that move other bytes, with these.
    """

    optimizer: str
    contenders: tuple[tuple[str, Make], ...]
    bytes_per_element: int
    parameters: str = "large"
    target: float | None = None
    tolerance: float = TOLERANCE
    others: tuple[tuple[str, Make, float], ...] = ()

    @property
    def name(self) -> str:
        """For --only and for the table."""
        return f"{self.optimizer}/step/{self.parameters}"

    @property
    def subject(self) -> str:
        """Whose time the peers' times are divided by."""
        return OURS

    @property
    def peers(self) -> tuple[str, ...]:
        """The others; the target is for the first."""
        return tuple(name for name, _ in self.contenders if name != OURS)

    @property
    def held_bytes(self) -> int:
        """Four fp32 tensors of each contender, common gradients, and what one step allocates."""
        return 16 * (len(self.contenders) + len(self.others)) + 4 + 8

    def load(self) -> ParameterSet:
        """The parameter set."""
        return load(self.parameters)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds the contenders, and compares each with ours after three steps."""
        makes = {**dict(self.contenders), **{name: make for name, make, _ in self.others}}
        names = usable(makes, MISSING)
        params = {name: self._params(device, seed) for name in names}
        made = {name: makes[name](params[name]) for name in names}
        grads = self.load().randn(torch.float32, device, seed + 1)
        for name, optimizer in made.items():
            for _ in range(3):
                self._fill_grads(params[name], grads)
                optimizer.step()
        errors = {
            name: max(map(difference, params[OURS], theirs)) for name, theirs in params.items()
        }
        peers = [name for name in self.peers if name in names]
        for name in peers:
            if not errors[name] <= self.tolerance:
                raise RuntimeError(
                    f"{self.name}: expected parameters of {name} within {self.tolerance:g} of "
                    f"ours after three steps, got {errors[name]:g}"
                )
        verified = {"params": max(errors[name] for name in peers)}
        others = {
            name: Other(count, errors[name]) for name, _, count in self.others if name in names
        }
        return Prepared({name: made[name].step for name in made}, verified, others)

    def _params(self, device: torch.device, seed: int) -> list[Tensor]:
        parameters = self.load()
        values = parameters.randn(torch.float32, device, seed)
        return [torch.nn.Parameter(value.mul_(0.1)) for value in values]

    @staticmethod
    def _fill_grads(params: list[Tensor], grads: list[Tensor]) -> None:
        """Before each step that is compared: DeepSpeed's Adagrad leaves updates in gradients.

        It does so for the elements that fill no vector.
        """
        for param, grad in zip(params, grads, strict=True):
            if param.grad is None:
                param.grad = grad.clone()
            else:  # a new tensor would be compiled for
                param.grad.copy_(grad)


def _made(kind: Any, **options: Any) -> Make:
    return lambda params: kind(params, lr=LEARNING_RATE, **options)


def _compiled(kind: Any, **options: Any) -> Make:
    return lambda params: CompiledStep(kind(params, lr=LEARNING_RATE, **options))


def _case(
    optimizer: str,
    bytes_per_element: int,
    *contenders: tuple[str, Make | None],
    tolerance: float = TOLERANCE,
) -> Case:
    present = tuple((name, make) for name, make in contenders if make is not None)
    target = 1.0 if DEEPSPEED in dict(present) else None
    return Case(optimizer, present, bytes_per_element, target=target, tolerance=tolerance)


def _of(package: str, module: str, name: str, **options: Any) -> Make | None:
    kind = class_of(package, module, name, MISSING)
    return None if kind is None else _made(kind, **options)


def _deepspeed(module: str, name: str, **options: Any) -> Make | None:
    return _of(DEEPSPEED, f"deepspeed.ops.{module}", name, **options)


_DECAY = {"weight_decay": 0.01}
_ALL_CASES = (
    _case(
        "adam",
        28,
        (OURS, _made(optimizers.FusedAdam, **_DECAY)),
        (DEEPSPEED, _deepspeed("adam", "DeepSpeedCPUAdam", adamw_mode=True, **_DECAY)),
        (BITSANDBYTES, _of(BITSANDBYTES, "bitsandbytes.optim", "AdamW", **_DECAY)),
        (FUSED, _made(torch.optim.AdamW, fused=True, **_DECAY)),
        (AGAIN, _made(torch.optim.AdamW, fused=True, **_DECAY)),
        (COMPILED, _compiled(torch.optim.AdamW, foreach=True, **_DECAY)),
    ),
    _case(
        "adagrad",
        20,
        (OURS, _made(optimizers.FusedAdagrad, eps=1e-10)),
        (DEEPSPEED, _deepspeed("adagrad", "DeepSpeedCPUAdagrad", eps=1e-10)),
        (FUSED, _made(torch.optim.Adagrad, fused=True)),
    ),
    _case(
        "lion",
        20,
        (OURS, _made(optimizers.FusedLion, **_DECAY)),
        (DEEPSPEED, _deepspeed("lion", "DeepSpeedCPULion", **_DECAY)),
        # An element moves by the sign of a sum, which rounding turns where the sum is near 0.
        tolerance=1e-4,
    ),
)
_LARGE_CASES = tuple(case for case in _ALL_CASES if case.peers)
#: Moments of a byte per element, with a scale for 256 of them.
_ADAM_8BIT_BYTES = 16 + 4 * 4 / 256
_ADAM_8BIT = tuple(
    (f"{package}, 8-bit", make, _ADAM_8BIT_BYTES)
    for package, module in ((BITSANDBYTES, "bitsandbytes.optim"), (TORCHAO, "torchao.optim"))
    if (make := _of(package, module, "AdamW8bit", **_DECAY)) is not None
)
#: The targets are those of the large set. The small one is what --quick runs; torchao would compile
#: for each of its shapes.
CASES = tuple(
    dataclasses.replace(case, others=_ADAM_8BIT if case.optimizer == "adam" else ())
    for case in _LARGE_CASES
) + tuple(dataclasses.replace(case, parameters="resnet50", target=None) for case in _LARGE_CASES)
