# SPDX-License-Identifier: BSD-3-Clause
"""Muon's step on the matrices of models, against torch.optim.Muon.

`default` rows compare both packages as they are: torch iterates in bf16, and torchfuse in bf16 if
the processor multiplies in bf16. `float32` rows iterate in fp32 on both sides. `ns_dtype` compares
torchfuse's two dtypes. torch accepts parameters with two dimensions only, so convolutions are
passed to torch as flattened views.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from suites.parameters import ParameterSet, load
from suites.steps import OURS, Contender, StepCase, ours
from torchfuse.optimizers import FusedMuon

MUON, AGAIN, MUON_FLOAT32 = "torch Muon", "torch Muon, again", "torch Muon, fp32"
OURS_FLOAT32 = "torchfuse, fp32"
#: A step reads parameter, gradient and momentum, and writes parameter and momentum. Products of
#: matrices take most of the time.
STEP = 20
#: With these options, a step replaces the parameter by the update, so `StepCase` compares updates.
_REPLACE: dict[str, Any] = {"lr": 1.0, "weight_decay": 1.0}
#: In bf16, rounding changes the updates by 2 %; fp32 updates differ by 2e-6.
TOLERANCES = {torch.bfloat16: 0.05, torch.float32: 1e-4}


_to: Any = torch.Tensor.to


def _to_float32(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    if options.get("dtype") is torch.bfloat16:
        options["dtype"] = torch.float32
    return cast("Tensor", _to(tensor, *arguments, **options))


class _Float32Muon(torch.optim.Muon):
    """torch.optim.Muon without the cast to bf16, which is bfloat16(), or to() since torch 2.15."""

    @mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)
    @mock.patch.object(torch.Tensor, "to", _to_float32)
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Performs one step."""
        super().step()  # type: ignore[no-untyped-call]


def _theirs(name: str, kind: type[torch.optim.Muon]) -> Contender:
    def make(params: list[Tensor], _: float | None) -> torch.optim.Muon:
        views = [torch.nn.Parameter(param.detach().flatten(1)) for param in params]
        for view, param in zip(views, params, strict=True):
            assert param.grad is not None
            view.grad = param.grad.flatten(1)
        return kind(views, **_REPLACE)

    return Contender(name, make)


def _ours(name: str, dtype: torch.dtype | None) -> Contender:
    return ours(FusedMuon, name, ns_dtype=dtype, **_REPLACE)


_TORCH = _theirs(MUON, torch.optim.Muon)
#: The subject and the peer, by the row's kind.
_CONTENDERS = {
    "default": (_ours(OURS, None), _TORCH),
    "float32": (_ours(OURS, torch.float32), _theirs(MUON_FLOAT32, _Float32Muon)),
    "ns_dtype": (_ours(OURS, torch.bfloat16), _ours(OURS_FLOAT32, torch.float32)),
    "noise": (_theirs(AGAIN, torch.optim.Muon), _TORCH),
}


@dataclasses.dataclass(frozen=True)
class MuonCase(StepCase):
    """A step on matrices; the result also has the peak of the memory that the step allocates."""

    @property
    def memory_unit(self) -> int:
        """Number of bytes of the largest group of matrices with one shape, in fp32."""
        counts = collections.Counter(self.parameters.shapes)
        return 4 * max(count * math.prod(shape) for shape, count in counts.items())


def _case(kind: str, parameters: ParameterSet) -> MuonCase:
    tolerance = TOLERANCES[torch.float32 if kind == "float32" else torch.bfloat16]
    name = f"{kind}/{parameters.name}"
    return MuonCase(name, parameters, _CONTENDERS[kind], STEP, tolerance=tolerance)


def _matrices(name: str) -> ParameterSet:
    """Returns a model's matrices, without GPT-2's embeddings."""
    embeddings = ((50257, 768), (1024, 768))
    shapes = load(name).shapes
    kept = tuple(shape for shape in shapes if len(shape) >= 2 and shape not in embeddings)
    return ParameterSet(name, kept)


_GPT2, _RESNET = _matrices("gpt2_124m"), _matrices("resnet50")
_SMALL = ParameterSet("small_400x128x128", ((128, 128),) * 400)
_KINDS = ("default", "float32", "ns_dtype")

CASES = (
    *(_case(kind, _GPT2) for kind in _KINDS),
    *(_case(kind, _RESNET) for kind in _KINDS[:2]),
    _case("default", _SMALL),
    _case("noise", _SMALL),
)


def _quick(case: MuonCase) -> MuonCase:
    """Returns the case on at most 100 small matrices, for GPT-2 on an eighth of the width."""
    shapes = case.parameters.shapes
    if case.parameters is _GPT2:
        shapes = tuple((rows // 8, columns // 8) for rows, columns in shapes)
    kept = tuple(shape for shape in shapes if math.prod(shape) <= 2**16)[:100]
    name = f"{case.name}_quick"
    return dataclasses.replace(case, name=name, parameters=ParameterSet(name, kept))


QUICK_CASES = tuple(_quick(case) for case in CASES)
