# SPDX-License-Identifier: BSD-3-Clause
"""What a GPU is asked in two minutes: device time by events, beside a copy and the prediction.

Sets that its caches hold are left to the other suites, all but 10,000 tensors and a single small
one, which show what launches and the host cost. `--quick` runs small sets of the same kinds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from suites import fused_adam, gpu_layers, optimizers, scenarios
from suites.contenders import FOREACH, FUSED, OURS, OURS_FROM_THE_END
from suites.fused_adam import MemoryCase, Prepared
from suites.parameters import ParameterSet, load
from torchfuse.optimizers import FusedAdam

QUICK_NUMEL = 30_000_000
MEMORY_CASES: tuple[MemoryCase, ...] = ()
LAUNCH_NUMEL = 1024
REPLAY, TORCH_REPLAY, EMPTY = "torchfuse, replayed", "torch fused, replayed", "an empty kernel"


@dataclasses.dataclass(frozen=True)
class UnscaleCase:
    """Check and unscale, against the operation of torch's scaler."""

    parameters: str

    subject = OURS
    peers = ("torch",)
    target = None
    bytes_per_element = 8
    held_bytes = 8

    @property
    def name(self) -> str:
        """For --only and for the table."""
        return f"unscale/{self.parameters}"

    def load(self) -> ParameterSet:
        """The gradients."""
        return load(self.parameters)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Both sides must halve the gradients, and find none that is not finite."""
        found_inf = torch.zeros((), device=device)
        half, one = (torch.full((), value, device=device) for value in (0.5, 1.0))
        functions: dict[str, Callable[[], object]] = {}
        for name, unscale in (
            (OURS, torch.ops.torchfuse.multi_tensor_unscale_),
            ("torch", torch._amp_foreach_non_finite_check_and_unscale_),
        ):
            grads = self.load().randn(torch.float32, device, seed)
            expected = [grad.mul(0.5) for grad in grads]
            unscale(grads, found_inf, half)
            if not all(map(torch.equal, grads, expected)) or float(found_inf) != 0:
                raise RuntimeError(f"{self.name}: expected {name} to halve finite gradients")
            # A factor of one leaves the numbers as they are, however often it is applied.
            functions[name] = functools.partial(unscale, grads, found_inf, one)
        return Prepared(functions, {})


class LaunchCase:
    """Adam on one small tensor, eager and as a graph: what a launch costs, and the host."""

    name = f"launch/{LAUNCH_NUMEL}"
    subject = OURS
    peers = (REPLAY, FUSED, TORCH_REPLAY, EMPTY)
    target = None
    bytes_per_element = fused_adam.STEP

    def load(self) -> ParameterSet:
        """The tensor."""
        return ParameterSet(self.name, ((LAUNCH_NUMEL,),), offset=0, moments={}, zero_grads=False)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Eager steps and replays; a kernel that does nothing takes one argument of 8 bytes."""
        functions: dict[str, Callable[[], object]] = {}
        for name, replay in ((OURS, REPLAY), (FUSED, TORCH_REPLAY)):
            functions[name] = self._optimizer(name, device, seed).step
            functions[replay] = self._graph(self._optimizer(name, device, seed))
        functions[EMPTY] = lambda: torch.cuda._sleep(0)
        return Prepared({name: functions[name] for name in (OURS, *self.peers)}, {})

    def _optimizer(self, name: str, device: torch.device, seed: int) -> torch.optim.Optimizer:
        (values,), (grad,) = (
            self.load().randn(torch.float32, device, seed + offset) for offset in (0, 1)
        )
        param = torch.nn.Parameter(values)
        param.grad = grad
        kind: Any = FusedAdam if name == OURS else torch.optim.AdamW
        options = {} if name == OURS else {"fused": True}
        optimizer: torch.optim.Optimizer = kind([param], 1e-3, capturable=True, **options)
        optimizer.step()
        return optimizer

    def _graph(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        return graph.replay


def _of(cases: Any, *names: str) -> list[Any]:
    """The cases of another suite that have these names, without a CPU's targets."""
    found = {case.name: dataclasses.replace(case, target=None) for case in cases}
    return [found[name] for name in names]


def _scenario(name: str, *peers: str) -> Any:
    """A scenario with few peers: ours is one of them."""
    (case,) = _of(scenarios.CASES, name)
    kept = tuple(peer for peer in case.contenders if peer.name in (OURS, *peers))
    return dataclasses.replace(case, contenders=kept)


_FROM_THE_END = fused_adam.Case(
    "scale_clip_step", "resnet50", (FUSED, OURS_FROM_THE_END), fused_adam.SCALE_CLIP_STEP
)
#: 1.5 billion gradients; of a step both contenders together would take 50 GB.
_NORM = fused_adam.Case("norm_and_check", "gpt2_xl", ("get_total_norm",), fused_adam.NORM)

CASES = (
    # First: torch's profiler, which counts the kernels of each case, makes later launches slower.
    LaunchCase(),
    *_of(fused_adam.CASES, "step/large", "bf16_step/large"),
    _scenario("masters/s0/large", FUSED, scenarios.TRANSFORMER_ENGINE),
    _FROM_THE_END,
    _scenario("fp32/s3/resnet50", FUSED, FOREACH, scenarios.BOTH),
    _scenario("masters/s3/large", FUSED, scenarios.APEX),
    # foreach would take minutes for so many tensors.
    dataclasses.replace(_of(fused_adam.CASES, "scale_clip_step/tiny_10000x64")[0], peers=(FUSED,)),
    _NORM,
    UnscaleCase("large"),
    *_of(
        optimizers.CASES,
        "lamb/step/bert_large_10_layers",
        "sgd/scale_clip/bert_large_10_layers",
        "novograd/step/bert_large_10_layers",
    ),
    *gpu_layers.CASES,
)
QUICK_CASES = (
    fused_adam.Case("scale_clip_step", "tiny_400", (FUSED,), fused_adam.SCALE_CLIP_STEP),
    dataclasses.replace(
        _scenario("fp32/s3/resnet50", FUSED, scenarios.BOTH), parameters="tiny_400"
    ),
    UnscaleCase("tiny_400"),
    *gpu_layers.QUICK_CASES,
    LaunchCase(),
)
