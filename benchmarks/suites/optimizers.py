# SPDX-License-Identifier: BSD-3-Clause
"""A row for each optimizer: against torch's own, or against what a user of torch writes.

`masters` rows have bf16 parameters and gradients with fp32 masters; the peer keeps the masters as
parameters of a torch optimizer, and copies gradients there and parameters back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from suites.composites import (
    CopiedMasters,
    ForeachLAMB,
    ForeachLARC,
    ForeachLARS,
    ForeachLion,
    ForeachNovoGrad,
)
from suites.contenders import FOREACH, FUSED, OUR_LAMB, OURS, scaled_step
from suites.fused_adam import MemoryCase, Prepared
from suites.parameters import ParameterSet, load
from torchfuse import optimizers
from torchfuse.amp import GradScaler
from torchfuse.parallel import LARC

QUICK_NUMEL = 30_000_000
SCALE = 65536.0
LEARNING_RATE = 1e-3

#: Relative difference in norm of the parameters after three steps. torch sums the norm of the
#: largest tensor in fp32 and misses it by 2e-3, which moves the parameters of LAMB by 6e-6.
TOLERANCE = 2e-5

Optimizer = Callable[[list[Tensor], float | None], torch.optim.Optimizer]


def _ours(kind: Any, **values: Any) -> Optimizer:
    return lambda params, max_norm: kind(params, lr=LEARNING_RATE, max_grad_norm=max_norm, **values)


def _with_masters(kind: Any, **values: Any) -> Optimizer:
    return _ours(kind, master_weights=True, **values)


def _our_larc(params: list[Tensor], max_norm: float | None) -> torch.optim.Optimizer:
    return LARC(optimizers.FusedSGD(params, LEARNING_RATE, **_SGD), clip=False)


def _torchs(kind: Any, **values: Any) -> Optimizer:
    return lambda params, max_norm: kind(params, lr=LEARNING_RATE, **values)


def _foreach_lamb(params: list[Tensor], max_norm: float | None) -> torch.optim.Optimizer:
    assert max_norm is not None
    return ForeachLAMB(params, LEARNING_RATE, 0.01, max_norm)


def _foreach(kind: Any, **values: Any) -> Optimizer:
    return lambda params, max_norm: kind(params, LEARNING_RATE, **values)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: one optimizer in one pipeline.

    `bytes_per_element` counts each stream that is read, and each that is written, once. `target` is
    how many times faster than the peer we want to be.
    """

    optimizer: str
    pipeline: str
    ours: Optimizer
    peer: Optimizer
    peers: tuple[str, ...]
    bytes_per_element: int
    clips: bool = False
    parameters: str = "bert_large_10_layers"
    target: float | None = None
    # Both have parameters, gradients and up to three states; foreach operations make copies.
    held_bytes = 56

    @property
    def name(self) -> str:
        """For --only and for the table."""
        return f"{self.optimizer}/{self.pipeline}/{self.parameters}"

    @property
    def subject(self) -> str:
        """Whose time the peers' times are divided by."""
        return OURS

    def load(self) -> ParameterSet:
        """The parameter set."""
        return load(self.parameters)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds both contenders and compares them after three steps."""
        pair = [
            _Contender(self, make, ours, device, seed)
            for make, ours in ((self.ours, True), (self.peer, False))
        ]
        for contender in pair:
            for _ in range(3):
                contender.step()
        difference = max(
            float((a.double() - b.double()).norm() / b.double().norm())
            for a, b in zip(pair[0].values(), pair[1].values(), strict=True)
        )
        if not difference <= TOLERANCE:
            raise RuntimeError(
                f"{self.name}: expected parameters within {TOLERANCE:g} of {self.peers[0]}'s after "
                f"three steps, got {difference:g}"
            )
        functions = {OURS: pair[0].step, self.peers[0]: pair[1].step}
        return Prepared(functions, {"params": difference})


class _Contender:
    """One side of a case. The loss scale is 1 and the norm below the clip: see contenders.py."""

    def __init__(
        self, case: Case, make: Optimizer, ours: bool, device: torch.device, seed: int
    ) -> None:
        masters = case.pipeline == "masters"
        dtype = torch.bfloat16 if masters else torch.float32
        parameters = case.load()
        self._params = [
            torch.nn.Parameter(values.mul_(0.1)) for values in parameters.randn(dtype, device, seed)
        ]
        for param, grad in zip(
            self._params, parameters.randn(dtype, device, seed + 1), strict=True
        ):
            param.grad = grad.mul_(0.5)
        self._max_norm = float(parameters.numel) ** 0.5 if case.clips else None
        self._scaler: TorchGradScaler | None = None
        self._step: Callable[[], object]
        self._ours = ours
        if masters and not ours:
            copies = [param.detach().float().requires_grad_() for param in self._params]
            self._optimizer = make(copies, self._max_norm)
            self._step = CopiedMasters(self._params, copies, self._optimizer.step).step
            self._masters = copies
            return
        self._optimizer = make(list(self._params), self._max_norm)
        self._step = self._optimizer.step
        if case.pipeline == "scale_clip":
            self._scaler = (GradScaler if ours else TorchGradScaler)(device.type, init_scale=1.0)
            self._scaler.scale(torch.zeros((), device=device))
            self._step = self._scaled_step

    def _scaled_step(self) -> None:
        assert self._scaler is not None
        assert self._max_norm is not None
        # Ours clips within the step.
        max_norm = None if self._ours else self._max_norm
        scaled_step(self._scaler, self._optimizer, self._params, max_norm)

    def step(self) -> None:
        """One step of the pipeline under test."""
        self._step()

    def values(self) -> list[Tensor]:
        """What the steps made of the parameters: of the masters where there are some."""
        if hasattr(self, "_masters"):
            return [master.detach() for master in self._masters]
        return [
            self._optimizer.state[param].get("master_param", param).detach()
            for param in self._params
        ]


_ADAM = {"weight_decay": 0.01}
_SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
_ADAGRAD = {"weight_decay": 0.0}
_LAMB = {"weight_decay": 0.01}
_NOVOGRAD = {"weight_decay": 0.01}
_LARS = {"weight_decay": 1e-4}
_LION = {"weight_decay": 0.01}

_TORCHS_ADAMW = _torchs(torch.optim.AdamW, fused=True, **_ADAM)
_TORCHS_SGD = _torchs(torch.optim.SGD, fused=True, **_SGD)
_TORCHS_ADAGRAD = _torchs(torch.optim.Adagrad, fused=True, **_ADAGRAD)
_FOREACH_NOVOGRAD = _foreach(ForeachNovoGrad, **_NOVOGRAD)
_FOREACH_LARS = _foreach(ForeachLARS, **_LARS)
_FOREACH_LION = _foreach(ForeachLion, **_LION)


def _step(
    name: str,
    ours: Optimizer,
    peer: Optimizer,
    peer_name: str,
    bytes_per_element: int,
    *,
    target: float | None = None,
    clips: bool = False,
) -> Case:
    return Case(
        name, "step", ours, peer, (peer_name,), bytes_per_element, target=target, clips=clips
    )


def _masters(
    name: str,
    ours: Optimizer,
    peer: Optimizer,
    peer_name: str,
    bytes_per_element: int,
    *,
    clips: bool = False,
) -> Case:
    return Case(
        name, "masters", ours, peer, (peer_name,), bytes_per_element, target=1.8, clips=clips
    )


_LARGE_CASES = (
    Case(
        "sgd",
        "scale_clip",
        _ours(optimizers.FusedSGD, **_SGD),
        _TORCHS_SGD,
        (FUSED,),
        24,
        clips=True,
        target=1.6,
    ),
    _step("sgd", _ours(optimizers.FusedSGD, **_SGD), _TORCHS_SGD, FUSED, 20),
    _step(
        "lamb",
        _ours(optimizers.FusedLAMB, **_LAMB),
        _foreach_lamb,
        FOREACH,
        44,
        target=2.5,
        clips=True,
    ),
    _step("novograd", _ours(optimizers.FusedNovoGrad, **_NOVOGRAD), _FOREACH_NOVOGRAD, FOREACH, 24),
    _step("lars", _ours(optimizers.FusedLARS, **_LARS), _FOREACH_LARS, FOREACH, 28),
    _step("larc", _our_larc, _foreach(ForeachLARC, **_LARS), FOREACH, 40),
    _step("lion", _ours(optimizers.FusedLion, **_LION), _FOREACH_LION, FOREACH, 20),
    _step(
        "adagrad",
        _ours(optimizers.FusedAdagrad, **_ADAGRAD),
        _TORCHS_ADAGRAD,
        FUSED,
        20,
        target=0.97,
    ),
    # bf16 gradient and parameter, fp32 master and states: read all but the parameter (what norms
    # need, twice), write all but the gradient.
    _masters("adam", _with_masters(optimizers.FusedAdam, **_ADAM), _TORCHS_ADAMW, FUSED, 28),
    _masters("sgd", _with_masters(optimizers.FusedSGD, **_SGD), _TORCHS_SGD, FUSED, 20),
    _masters(
        "adagrad", _with_masters(optimizers.FusedAdagrad, **_ADAGRAD), _TORCHS_ADAGRAD, FUSED, 20
    ),
    _masters(
        "lamb",
        _with_masters(optimizers.FusedLAMB, **_LAMB),
        _foreach_lamb,
        FOREACH,
        28,
        clips=True,
    ),
    _masters(
        "mixed_precision_lamb",
        _ours(optimizers.FusedMixedPrecisionLamb, reduced_precision_dtype=torch.bfloat16, **_LAMB),
        _foreach_lamb,
        FOREACH,
        28,
        clips=True,
    ),
    _masters(
        "novograd",
        _with_masters(optimizers.FusedNovoGrad, **_NOVOGRAD),
        _FOREACH_NOVOGRAD,
        FOREACH,
        22,
    ),
    _masters("lars", _with_masters(optimizers.FusedLARS, **_LARS), _FOREACH_LARS, FOREACH, 26),
    _masters("lion", _with_masters(optimizers.FusedLion, **_LION), _FOREACH_LION, FOREACH, 20),
)

#: The targets are those of the large set. The small one is what --quick runs.
CASES = _LARGE_CASES + tuple(
    dataclasses.replace(case, parameters="resnet50", target=None) for case in _LARGE_CASES
)

MEMORY_CASES = tuple(
    MemoryCase(OUR_LAMB, name, target_mib=32.0) for name in ("resnet50", "bert_large_10_layers")
)
