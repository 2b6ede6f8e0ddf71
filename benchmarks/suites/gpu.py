# SPDX-License-Identifier: BSD-3-Clause
"""Cases that a GPU runs in two minutes, timed by CUDA events and compared with a copy.

The parameter sets do not fit in the GPU's caches, except for 10,000 small tensors and a single
small tensor, which show launch and host overhead. `QUICK_CASES` uses small sets of the same kinds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from suites import fused_adam, optimizers
from suites.layers import BATCH_NORM_SHAPES, ROW_SHAPES, THEIRS, LayerCase
from suites.parameters import ParameterSet, load
from suites.scenarios import case as scenario
from suites.steps import FUSED, OURS, WEIGHT_DECAY, Contender, StepCase
from torchfuse.optimizers import FusedAdam

LAUNCH_NUMEL = 1024
REPLAY, TORCH_REPLAY, EMPTY = "torchfuse, replayed", "torch fused, replayed", "an empty kernel"


@dataclasses.dataclass(frozen=True)
class UnscaleCase:
    """Overflow check and unscaling, against the op that torch's scaler calls."""

    parameters: ParameterSet

    subject = OURS
    peers = (THEIRS,)
    bytes_per_element = 8

    @property
    def name(self) -> str:
        """Name for --only and the table."""
        return f"unscale/{self.parameters.name}"

    def prepare(self, device: torch.device, seed: int) -> Mapping[str, Callable[[], object]]:
        """Verifies that both sides halve finite gradients, and returns the functions to time."""
        found_inf = torch.zeros((), device=device)
        half, one = (torch.full((), value, device=device) for value in (0.5, 1.0))
        functions: dict[str, Callable[[], object]] = {}
        for name, unscale in (
            (OURS, torch.ops.torchfuse.multi_tensor_unscale_),
            (THEIRS, torch._amp_foreach_non_finite_check_and_unscale_),
        ):
            grads = self.parameters.randn(torch.float32, device, seed)
            expected = [grad.mul(0.5) for grad in grads]
            unscale(grads, found_inf, half)
            if not all(map(torch.equal, grads, expected)) or float(found_inf) != 0:
                raise RuntimeError(f"{self.name}: expected {name} to halve finite gradients")
            # Repeated calls with factor 1 do not change the gradients.
            functions[name] = functools.partial(unscale, grads, found_inf, one)
        return functions


class LaunchCase:
    """Adam on one small tensor, eager and as a graph: measures launch and host overhead."""

    name = f"launch/{LAUNCH_NUMEL}"
    subject = OURS
    peers = (REPLAY, FUSED, TORCH_REPLAY, EMPTY)
    bytes_per_element = fused_adam.STEP
    parameters = ParameterSet(name, ((LAUNCH_NUMEL,),))

    def prepare(self, device: torch.device, seed: int) -> Mapping[str, Callable[[], object]]:
        """Returns eager steps, graph replays and an empty kernel with one 8-byte argument."""
        functions: dict[str, Callable[[], object]] = {EMPTY: lambda: torch.cuda._sleep(0)}
        for name, replay in ((OURS, REPLAY), (FUSED, TORCH_REPLAY)):
            functions[name] = self._optimizer(name, device, seed).step
            optimizer = self._optimizer(name, device, seed)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            functions[replay] = graph.replay
        return functions

    def _optimizer(self, name: str, device: torch.device, seed: int) -> torch.optim.Optimizer:
        (value,), (grad,) = (
            self.parameters.randn(torch.float32, device, seed + offset) for offset in (0, 1)
        )
        param = torch.nn.Parameter(value)
        param.grad = grad
        kind: Any = FusedAdam if name == OURS else torch.optim.AdamW
        options = {} if name == OURS else {"fused": True}
        optimizer: torch.optim.Optimizer = kind([param], 1e-3, capturable=True, **options)
        optimizer.step()
        return optimizer


def _from_the_end(params: list[torch.Tensor], max_norm: float | None) -> Any:
    optimizer = FusedAdam(params, 1e-3, weight_decay=WEIGHT_DECAY, max_grad_norm=max_norm)
    optimizer._update_from_the_end = True
    return optimizer


def _against_fused(case: StepCase) -> StepCase:
    """Returns the case without the foreach peer, which would take minutes for many tensors."""
    kept = tuple(c for c in case.contenders if c.name in (OURS, FUSED))
    return dataclasses.replace(case, contenders=kept)


def _layers(
    layer: str, shapes: Sequence[tuple[int, ...]], layouts: Sequence[str] = ("",)
) -> list[LayerCase]:
    """Returns cases that time forward and backward separately."""
    return [
        LayerCase(
            "/".join(filter(None, (layer, direction, name, layout, "x".join(map(str, shape))))),
            layer,
            shape,
            dtype,
            direction,
            channels_last=layout == "nhwc",
        )
        for shape in shapes
        for layout in layouts
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for direction in ("forward", "backward")
    ]


_LAYOUTS = ("nchw", "nhwc")
_OF_OPTIMIZERS = ("lamb/step", "sgd/scale_clip", "novograd/step")
_REVERSED = Contender("torchfuse, update from the end", _from_the_end, ours=True)

CASES = (
    # Keep first: torch's profiler, which counts each case's kernels, slows down later launches.
    LaunchCase(),
    fused_adam.case("step", "large", FUSED),
    fused_adam.case("bf16_step", "large", FUSED, dtype=torch.bfloat16),
    _against_fused(scenario(True, "s0", "large")),
    fused_adam.case("scale_clip_step", "resnet50", FUSED, _REVERSED),
    scenario(False, "s3", "resnet50"),
    _against_fused(scenario(True, "s3", "large")),
    fused_adam.case("scale_clip_step", "tiny_10000x64", FUSED),
    fused_adam.NormCase(load("gpt2_xl")),
    UnscaleCase(load("large")),
    *(c for c in optimizers.CASES if c.name.startswith(_OF_OPTIMIZERS) and "bert" in c.name),
    # One layer of each kind first, in case time runs out. The vocabulary size is odd.
    *_layers("cross_entropy", ((4096, 50257),)),
    *_layers("batch_norm", BATCH_NORM_SHAPES[:1], _LAYOUTS),
    *_layers("layer_norm", ROW_SHAPES),
    *_layers("batch_norm", BATCH_NORM_SHAPES[1:], _LAYOUTS),
    *_layers("rms_norm", ROW_SHAPES),
)
QUICK_CASES = (
    fused_adam.case("scale_clip_step", "tiny_400", FUSED),
    _against_fused(scenario(False, "s3", "tiny_400")),
    UnscaleCase(load("tiny_400")),
    *_layers("batch_norm", ((2, 8, 7, 7),), _LAYOUTS),
    *_layers("layer_norm", ((16, 64),)),  # the pretended device lacks torch's RMS norm
    *_layers("cross_entropy", ((16, 1001),)),
    LaunchCase(),
)
