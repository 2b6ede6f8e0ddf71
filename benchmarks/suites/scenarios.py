# SPDX-License-Identifier: BSD-3-Clause
"""The Adam step in four scenarios on the shapes of models, with all peers in the same run.

S0 is the step alone, S1 has loss scaling (check, unscale, conditional skip), S2 clips by the global
norm, S3 does both. Parameters are fp32, or bf16 with fp32 masters; moments are fp32 for all, so
that every peer of a case has the same result, states and model bytes. How often a peer passes over
memory for that is its own affair, and stands beside its time as pass bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from suites.compiled_step import Compiled
from suites.contenders import FOREACH, FUSED, OURS, largest_difference
from suites.fused_adam import MemoryCase, Prepared
from suites.packages import COMPILED, DEEPSPEED, class_of, usable
from suites.parameters import ParameterSet, load
from suites.pipelines import SCENARIOS, Memory, Ours, Pipeline, Scenario, Theirs, fp64_norm
from suites.structures import Structure

QUICK_NUMEL = 30_000_000
MEMORY_CASES: tuple[MemoryCase, ...] = ()
#: Peers that could not be made, and why.
MISSING: dict[str, str] = {}
FOR_LOOP = "torch for-loop"
STATIC = "torch compiled, static scale"
BOTH = "apex/TE structure"
APEX = "apex structure"
TRANSFORMER_ENGINE = "TE structure"
SCALE = 65536.0
STEPS = 3
#: Relative differences in norm of parameters and first moments from ours, by peer. Structures with
#: bf16 gradients write them back after clipping, and round them there.
TOLERANCES = (5e-6, 5e-6)
ROUNDED = (2e-4, 4e-3)

Make = Callable[[Memory, Scenario, float], Pipeline]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A contender, and the bytes of its passes per element in each scenario that it has.

    `bytes` counts what its operations read and write; None if that is more than their operands.
    """

    name: str
    make: Make
    bytes: Mapping[str, float | None]
    tolerances: tuple[float, float] = TOLERANCES


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a scenario in one precision on one parameter set.

    `bytes_per_element` counts what the scenario must move at least: each stream that is read, and
    each that is written, once; and gradients once more where a decision needs them all first.
    """

    masters: bool
    scenario: Scenario
    parameters: str
    contenders: tuple[Peer, ...]
    target: float | None = None

    subject = OURS

    @property
    def name(self) -> str:
        """For --only and for the table."""
        precision = "masters" if self.masters else "fp32"
        return f"{precision}/{self.scenario.name}/{self.parameters}"

    @property
    def quick(self) -> bool:
        """Whether the case belongs to --quick."""
        return self.parameters == _QUICK

    @property
    def bytes_per_element(self) -> int:
        """Reads of gradients are 2 bytes with masters, and 4 else; the step has 28 in both."""
        decides = self.scenario.scales or self.scenario.clips
        return 28 + decides * (2 if self.masters else 4)

    @property
    def peers(self) -> tuple[str, ...]:
        """All but ours."""
        return tuple(peer.name for peer in self.contenders if peer.name != OURS)

    @property
    def held_bytes(self) -> int:
        """The common memory, what it is filled and compared with, and the states of one contender.

        Foreach operations allocate 8 bytes more.
        """
        common, values, states = (20, 4, 12) if self.masters else (16, 8, 8)
        return common + values + 8 + states + 8

    def load(self) -> ParameterSet:
        """The parameter set."""
        return load(self.parameters)

    def prepare(self, device: torch.device, seed: int) -> Prepared:
        """Builds the contenders one after another, and compares each with ours."""
        parameters = self.load()
        dtype = torch.bfloat16 if self.masters else torch.float32
        values = [value.mul_(0.1) for value in parameters.randn(dtype, device, seed)]
        grads = parameters.randn(dtype, device, seed + 1)
        memory = Memory.of(parameters, self.masters, device)
        verified = {"params": 0.0, "exp_avg": 0.0}
        expected: list[list[Tensor]] = []
        made = {}
        names = usable((peer.name for peer in self.contenders), MISSING)
        contenders = [peer for peer in self.contenders if peer.name in names]
        for peer in contenders:
            memory.reset(values)
            made[peer.name] = pipeline = peer.make(memory, self.scenario, SCALE)
            self._verification_steps(peer.name, pipeline, grads)
            if not expected:
                streams = (memory.masters, memory.means)
                expected = [[value.clone() for value in stream] for stream in streams]
            self._compare(peer, memory, expected, verified)
            pipeline.set_scale(1.0)
            pipeline.norm = None
            gc.collect()  # states that a first step allocated
        memory.fill_grads(grads, 0.5)
        steps = {name: pipeline.step for name, pipeline in made.items()}
        passes = {peer.name: peer.bytes[self.scenario.name] for peer in contenders}
        return Prepared(steps, verified, pass_bytes=passes)

    def prepare_host(self, device: torch.device) -> dict[str, Callable[[], object]]:
        """The steps on tensors of one element: all but what is compiled for each shape."""
        cut = self.load().of_one_element()
        steps: dict[str, Callable[[], object]] = {}
        for peer in self.contenders:
            if peer.make is not Compiled:
                memory = Memory.of(cut, self.masters, device)
                for values in (memory.masters, memory.params, memory.grads):
                    torch._foreach_zero_(values)
                steps[peer.name] = peer.make(memory, self.scenario, 1.0).step
        return steps

    def _verification_steps(self, name: str, pipeline: Pipeline, grads: list[Tensor]) -> None:
        """Steps with a real scale and with clipping at work, and one that must be skipped."""
        memory, scenario = pipeline.memory, self.scenario
        pipeline.norm = fp64_norm
        factor = 2.0 * (SCALE if scenario.scales else 1.0)
        for _ in range(STEPS):
            memory.fill_grads(grads, factor)
            pipeline.step()
        pipeline.move_states()
        if scenario.scales and pipeline.skips:
            before = [value.clone() for value in memory.masters]
            memory.fill_grads(grads, factor)
            memory.grads[0].view(-1)[0] = float("inf")
            pipeline.step()
            if not all(map(torch.equal, before, memory.masters)):
                raise RuntimeError(
                    f"{self.name}: expected {name} to skip a step with an infinite gradient, "
                    "but its parameters changed"
                )

    def _compare(
        self,
        peer: Peer,
        memory: Memory,
        expected: list[list[Tensor]],
        verified: dict[str, float],
    ) -> None:
        if self.masters and not all(map(_is_rounded, memory.params, memory.masters)):
            raise RuntimeError(
                f"{self.name}: expected the parameters of {peer.name} to be its masters, rounded"
            )
        streams = (memory.masters, memory.means)
        for key, values, ours, limit in zip(
            verified, streams, expected, peer.tolerances, strict=True
        ):
            error = largest_difference(values, ours)
            verified[key] = max(verified[key], error)
            if not error <= limit:
                raise RuntimeError(
                    f"{self.name}: expected {key} of {peer.name} within {limit:g} of {OURS}'s "
                    f"after {STEPS} steps, got {error:g}"
                )


def _is_rounded(param: Tensor, master: Tensor) -> bool:
    return torch.equal(param, master.to(param.dtype))


def _theirs(kind: Any, **options: Any) -> Make:
    return functools.partial(Theirs, kind=kind, **options)


def _bytes(s0: float, s1: float, s2: float, s3: float) -> dict[str, float | None]:
    return dict(zip((scenario.name for scenario in SCENARIOS), (s0, s1, s2, s3), strict=True))


_UNKNOWN: dict[str, float | None] = dict.fromkeys(scenario.name for scenario in SCENARIOS)
_ADAMW = torch.optim.AdamW
#: torch's emulation of masters: 6 to copy gradients, 28 for the step, 6 to copy parameters back.
#: Its scaler checks by unscaling in place, and its fused step writes gradients that it unscales.
_FP32 = (
    Peer(OURS, Ours, _bytes(28, 32, 32, 32)),
    Peer(FUSED, _theirs(_ADAMW, fused=True), _bytes(28, 40, 40, 48)),
    Peer(FOREACH, _theirs(_ADAMW, foreach=True), _UNKNOWN),
    Peer(BOTH, Structure, _bytes(28, 36, 40, 48)),
)
_MASTERS = (
    Peer(OURS, Ours, _bytes(28, 30, 30, 30)),
    Peer(FUSED, _theirs(_ADAMW, fused=True), _bytes(40, 52, 52, 60)),
    Peer(FOREACH, _theirs(_ADAMW, foreach=True), _UNKNOWN),
    Peer(
        APEX,
        functools.partial(Structure, adam_writes_grads=True),
        _bytes(30, 34, 36, 40),
        ROUNDED,
    ),
    Peer(TRANSFORMER_ENGINE, Structure, _bytes(28, 32, 34, 38), ROUNDED),
)
_LOOP = Peer(FOR_LOOP, _theirs(_ADAMW, fused=False, foreach=False), _UNKNOWN)
_COMPILED = {
    "s0": Peer(COMPILED, Compiled, {"s0": 28.0}),
    "s2": Peer(COMPILED, Compiled, {"s2": 32.0}),
    "s3": Peer(STATIC, Compiled, {"s3": 32.0}),
}
#: A loop over more tensors, or tensors with more elements, takes seconds per step.
_LOOPS = ("resnet50", "ddp_buckets", "misaligned")
#: torch.compile takes a minute and a half for the 161 tensors of ResNet-50, in each scenario.
_COMPILES = ("large",)
#: Models with all scenarios, and shapes for which the first and the last one say enough.
_MODELS = ("resnet50", "vit_l16_6_layers", "gpt2_124m")
_SHAPES = (
    "large",
    "bert_large_10_layers",
    "lora_1024x8x4096",
    "ddp_buckets",
    "misaligned",
    "tiny_10000x64",
)
#: The set of --quick.
_QUICK = "resnet50"


def _case(masters: bool, scenario: Scenario, parameters: str) -> Case:
    contenders = list(_MASTERS if masters else _FP32)
    if parameters in _LOOPS:
        contenders.append(_LOOP)
    if parameters in _COMPILES and scenario.name in _COMPILED:
        compiled = _COMPILED[scenario.name]
        if masters and scenario.clips:
            compiled = dataclasses.replace(compiled, bytes={scenario.name: 30.0})
        contenders.append(compiled)
    if not masters and scenario.name == "s0":
        kind = class_of(DEEPSPEED, "deepspeed.ops.adam", "DeepSpeedCPUAdam", MISSING)
        if kind is not None:
            make = _theirs(kind, adamw_mode=True)
            contenders.insert(2, Peer(DEEPSPEED, make, {"s0": 28.0}))
    return Case(masters, scenario, parameters, tuple(contenders))


CASES = tuple(
    _case(masters, scenario, parameters)
    for masters in (False, True)
    for scenario in SCENARIOS
    for parameters in (*_MODELS, *_SHAPES)
    if parameters in _MODELS or scenario.scales == scenario.clips
)
