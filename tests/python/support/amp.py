# SPDX-License-Identifier: BSD-3-Clause
"""Training by hand at each optimization level, in plain torch: the oracle of apex.amp."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchfuse.optimizers import FusedAdam, FusedSGD

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
#: (step, number of the parameter): there, one element of the gradient is not finite.
Overflow = tuple[int, int]

LEVELS = ("O0", "O1", "O2", "O3")
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-4),
}


def make_model(device: str = "cpu") -> Any:
    torch.manual_seed(3)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(device)


def make_batches(count: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(16, 6, generator=generator).to(device),
            torch.randint(3, (16,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def prepared(
    amp: Any, level: str, name: str = "FusedAdam", device: str = "cpu", **options: Any
) -> tuple[Any, Any]:
    """A model and one of OPTIMIZERS after amp.initialize."""
    model = make_model(device)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def backward(amp: Any, loss: Tensor, optimizers: Any, *args: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizers, *args, **options) as scaled_loss:
        scaled_loss.backward()


def grads_of(amp: Any, optimizer: Any) -> list[Tensor]:
    """Copies of the gradients that a step uses."""
    return [param.grad.clone() for param in amp.master_params(optimizer)]


def spoil(model: nn.Module, number: int) -> None:
    """Makes one element of a gradient infinite."""
    grad = list(model.parameters())[number].grad
    assert grad is not None
    grad.view(-1)[-1] = float("inf")


@dataclasses.dataclass
class ByHand:
    """A model in training, with what a level prescribes.

    Args:
        level: "O0" to "O3".
        make_optimizer: called with the fp32 masters, or the parameters without masters.
        scale: the loss scale; it changes only if `dynamic`.
        short: the 16-bit dtype.
    """

    level: str
    make_optimizer: MakeOptimizer
    scale: float
    dynamic: bool
    short: torch.dtype = torch.float16
    device: str = "cpu"
    max_norm: float | None = None

    def __post_init__(self) -> None:
        self.model = make_model(self.device)
        if self.level in ("O2", "O3"):
            self.model.to(self.short)
        if self.level == "O2":
            self.model[1].float()
        self.params = list(self.model.parameters())
        self.masters = [
            nn.Parameter(p.detach().float()) if self.level == "O2" and p.dtype == self.short else p
            for p in self.params
        ]
        self.optimizer = self.make_optimizer(self.masters)
        self.skipped: list[int] = []

    def loss(self, data: Tensor, target: Tensor) -> Tensor:
        if self.level == "O1":
            with torch.autocast(self.device, dtype=self.short):
                output = self.model(data)
        else:
            output = self.model(data.to(self.params[0].dtype))
        return cross_entropy(output.float(), target)

    def step(self, index: int, batch: tuple[Tensor, Tensor], overflows: Sequence[Overflow]) -> None:
        for tensor in (*self.params, *self.masters):
            tensor.grad = None
        (self.loss(*batch) * self.scale).backward()
        for at, number in overflows:
            if at == index:
                spoil(self.model, number)
        finite = True
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            finite &= bool(param.grad.isfinite().all())
            grad = param.grad.float() * (1.0 / self.scale)
            master.grad = grad.to(master.dtype)
        if self.dynamic and not finite:
            self.scale /= 2
            self.skipped.append(index)
            return
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters, self.max_norm)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if param is not master:
                    param.copy_(master)

    def train(
        self, batches: Sequence[tuple[Tensor, Tensor]], overflows: Sequence[Overflow] = ()
    ) -> ByHand:
        for index, batch in enumerate(batches):
            self.step(index, batch, overflows)
        return self


def tensors_of(
    model: nn.Module, masters: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Copies of all that a step may change, by name, with one kind of NaN."""
    found = {f"model.{name}": value for name, value in model.named_parameters()}
    found.update({f"model.{name}": value for name, value in model.named_buffers()})
    for number, master in enumerate(masters):
        found[f"master{number}"] = master
        for key, value in optimizer.state.get(master, {}).items():
            if isinstance(value, Tensor):
                found[f"state{number}.{key}"] = value
    return {name: _with_one_nan(value.detach()) for name, value in found.items()}


def all_tensors(amp: Any, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """tensors_of with amp's masters."""
    return tensors_of(model, list(amp.master_params(optimizer)), optimizer)


def _with_one_nan(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value.clone()
    return value.clone().masked_fill_(value.isnan(), float("nan"))


def train_with(
    amp: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    overflows: Sequence[Overflow] = (),
    max_norm: float | None = None,
) -> None:
    """The loop of a program for apex."""
    for index, (data, target) in enumerate(batches):
        optimizer.zero_grad()
        loss = cross_entropy(model(data), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            for at, number in overflows:
                if at == index:
                    spoil(model, number)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)
        optimizer.step()
