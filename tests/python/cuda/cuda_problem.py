# SPDX-License-Identifier: BSD-3-Clause
"""A whole fused step on any dtype tuple and layout, from the same start on any device.

Tensors are views of a few buffers with gaps between them: addresses are as uneven as in a real
program, and a write outside of a tensor shows, because buffers are compared whole.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_NAMES = {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64"}


@dataclass(frozen=True)
class Kind:
    """A dtype tuple: parameter, gradient, moments, and whether an fp32 master stands behind."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: bool = False

    def __str__(self) -> str:
        names = [_NAMES[dtype] for dtype in (self.param, self.grad, self.state)]
        return "-".join([*names, "master"] if self.master else names)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments with which FusedAdam has states and masters of this kind."""
        state_dtype = self.state if self.state in (F16, BF16) else None
        return {"master_weights": self.master, "state_dtype": state_dtype}


#: Every tuple with an update kernel of its own (csrc/kernels/cuda/typed_tuples.h).
KINDS = [
    *(Kind(F32, grad, F32) for grad in (F32, F16, BF16)),
    *(
        Kind(half, grad, state, master)
        for half in (F16, BF16)
        for grad in (half, F32)
        for state, master in ((F32, False), (F32, True), (half, False))
    ),
    Kind(F64, F64, F64),
]
#: Gradients of other dtypes: 16-bit ones are read as they are, for fp64 a converted copy stands in.
CONVERTED_KINDS = [
    Kind(BF16, F16, F32, master=True),
    Kind(F16, BF16, F16),
    Kind(F32, F64, F32),
    Kind(F64, F32, F64),
]
PLAIN_KIND = Kind(F32, F32, F32)
#: One tuple of each sort, for tests that need not see them all.
FEW_KINDS = [PLAIN_KIND, Kind(BF16, BF16, BF16), Kind(F16, F16, F32, master=True)]

#: Around the borders of warps (512 elements), vectors, blocks and chunks (16,384).
SIZES = [1, 0, 3, 17, 512, 513, 1025, 4097, 16_384, 33_001]
#: More tensors than a launch that updates or sums holds: 400 to 1,700 rows.
SEVERAL_LAUNCHES = [*(1 + 37 * i % 97 for i in range(1800)), 600, 33_001]
#: More tensors than any launch holds: one that counts steps holds 4,000.
MANY_SIZES = [*(1 + 37 * i % 97 for i in range(4300)), 600, 33_001]

#: All streams 16-byte aligned; all three elements further; each tensor of each stream elsewhere.
LAYOUTS = ["aligned", "shifted", "packed"]

Groups = Sequence[Mapping[str, Any]]
GROUPS: Groups = (
    {"weight_decay": 0.1},
    {
        "lr": 3e-3,
        "weight_decay": 0.05,
        "adam_w_mode": False,
        "amsgrad": True,
        "maximize": True,
    },
    {"betas": (0.8, 0.95), "eps": 1e-6, "bias_correction": False},
)

_STREAMS = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")


def place(sizes: Sequence[int], layout: str, stream: int = 0) -> list[slice]:
    """Where the tensors of one stream lie in its buffer; between any two there is a gap."""
    slices, end = [], 0
    for index, size in enumerate(sizes):
        if layout == "packed":
            begin = end + 1 + (stream + index) % 3
        else:
            begin = -(-(end + 1) // 64) * 64 + (3 if layout == "shifted" else 0)
        end = begin + size
        slices.append(slice(begin, end))
    return slices


def random_values(size: int, seed: int, *, exact: bool = False) -> Tensor:
    """In fp64; `exact`: multiples of 1/8 below 1, whose sums of squares are exact in any order."""
    return _drawn(size, seed, exact).clone()


@functools.lru_cache(maxsize=32)
def _drawn(size: int, seed: int, exact: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if exact:
        return torch.randint(-7, 8, (size,), generator=generator).double() / 8
    return torch.randn(size, generator=generator, dtype=F64)


class Problem:
    """A FusedAdam over views of one buffer, with gradients in another; the same on all devices.

    The layout "packed" also spreads moments and masters, which the optimizer creates otherwise. The
    groups share the parameters in order.
    """

    def __init__(
        self,
        kind: Kind,
        sizes: Sequence[int],
        device: str,
        *,
        layout: str = "aligned",
        groups: Groups = GROUPS,
        magnitude: float = 1.0,
        **options: Any,
    ) -> None:
        self.kind = kind
        self.sizes = sizes
        self.device = device
        self.layout = layout
        self.memory: dict[str, Tensor] = {}
        values = self._buffer("param", kind.param, magnitude)
        self.params = [torch.nn.Parameter(view) for view in values]
        self.grads = self._buffer("grad", kind.grad, 0.0)
        for param, grad in zip(self.params, self.grads, strict=True):
            if param.dtype != grad.dtype:
                param.grad_dtype = None
            param.grad = grad
        share = -(-len(sizes) // len(groups))
        self.optimizer = FusedAdam(
            [
                {"params": self.params[g * share : (g + 1) * share], **group}
                for g, group in enumerate(groups)
            ],
            **kind.options,
            **options,
        )
        if layout == "packed":
            self._spread_states()

    def _buffer(self, stream: str, dtype: torch.dtype, magnitude: float) -> list[Tensor]:
        """Makes the buffer of a stream, also its gaps, and returns its tensors."""
        number = _STREAMS.index(stream)
        slices = place(self.sizes, self.layout, number)
        size = slices[-1].stop + 64
        values = random_values(size, number) * magnitude if magnitude else torch.zeros(size)
        self.memory[stream] = values.to(dtype).to(self.device)
        return [self.memory[stream][where] for where in slices]

    def _spread_states(self) -> None:
        names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        states = {name: self._buffer(name, self.kind.state, 0.0) for name in names}
        if self.kind.master:
            states["master_param"] = self._buffer("master_param", F32, 0.0)
            for master, param in zip(states["master_param"], self.params, strict=True):
                master.copy_(param.detach())
        index = 0
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                kept = set(states) if group["amsgrad"] else set(states) - {"max_exp_avg_sq"}
                self.optimizer.state[param] = {name: states[name][index] for name in kept}
                index += 1

    def grad_values(self, seed: int, scale: float = 1.0, *, exact: bool = False) -> Tensor:
        """Contents of the gradients' buffer for one step, on the CPU."""
        values = random_values(self.memory["grad"].numel(), 1000 + seed, exact=exact)
        return (values * scale).to(self.kind.grad)

    def fill_grads(self, seed: int, scale: float = 1.0, *, exact: bool = False) -> None:
        self.memory["grad"].copy_(self.grad_values(seed, scale, exact=exact))

    def spoil_grads(self, value: float = float("inf"), tensor: int = -1, element: int = -1) -> None:
        """Puts a value that is not finite into one element of one gradient."""
        self.grads[tensor][element] = value

    def result(self) -> dict[str, Tensor]:
        """Copies on the CPU of everything that a step leaves, by name."""
        values = dict(self.memory)
        states = [self.optimizer.state.get(param, {}) for param in self.params]
        for name in sorted({name for state in states for name in state}):
            tensors = [state[name].reshape(-1) for state in states if name in state]
            values[f"state {name}"] = torch.cat(tensors)
        for name in ("grad_norm", "last_step_skipped"):
            value = getattr(self.optimizer, name)()
            if value is not None:
                values[name] = value
        return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}


def make_scaler(device: str, kind: Any = GradScaler, **options: Any) -> Any:
    """A scaler whose scale moves within a few steps, and small enough for fp16 gradients."""
    return kind(device, **{"init_scale": 64.0, "growth_interval": 2, **options})


def scaled_step(problem: Problem, scaler: Any, *, unscale: bool = False) -> None:
    """What a training loop does after backward(); the scale exists after the first call."""
    if unscale:
        scaler.unscale_(problem.optimizer)
    scaler.step(problem.optimizer)
    scaler.update()


@dataclass(frozen=True)
class Run:
    """How the steps of a test are driven."""

    steps: int = 4
    scaled: bool = False  # under a GradScaler
    unscale: bool = False  # by the scaler before each step
    overflows: frozenset[int] = frozenset()  # steps with an infinite gradient, which it skips
    exact: bool = False  # gradients whose norm is the same in any order of summation
    magnitude: float = 1.0  # of the gradients


def train(problem: Problem, run: Run) -> dict[str, Tensor]:
    """Steps as `run` says; `problem.result()` and the state of the scaler, if there is one."""
    scaler = make_scaler(problem.device) if run.scaled else None
    loss = torch.ones((), device=problem.device)
    for seed in range(run.steps):
        scale = run.magnitude
        if scaler is not None:
            scaler.scale(loss)
            scale *= scaler.get_scale()
        problem.fill_grads(seed, scale, exact=run.exact)
        if seed in run.overflows:
            problem.spoil_grads()
        if scaler is None:
            problem.optimizer.step()
        else:
            scaled_step(problem, scaler, unscale=run.unscale)
    result = problem.result()
    if scaler is not None:
        for name in ("_scale", "_growth_tracker"):
            result[name] = getattr(scaler, name).to("cpu", copy=True)
    return result
