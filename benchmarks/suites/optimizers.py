# SPDX-License-Identifier: BSD-3-Clause
"""A row for each optimizer, against torch's optimizer or a composition of torch's operations.

`masters` rows use bf16 parameters and gradients with fp32 masters. The peer passes the masters to a
torch optimizer, copies gradients to the masters and copies the masters back to the parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from suites.composites import ForeachLAMB, ForeachLARC, ForeachLARS, ForeachLion, ForeachNovoGrad
from suites.parameters import load
from suites.steps import FOREACH, FUSED, LEARNING_RATE, OURS, Contender, StepCase, ours, theirs
from torchfuse import optimizers
from torchfuse.parallel import LARC

#: torch's fp32 norm of the largest tensor has a relative error of 2e-3, which changes LAMB's
#: parameters by 6e-6.
TOLERANCE = 2e-5
_DECAY: dict[str, Any] = {"weight_decay": 0.01}
_SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
_LARS: dict[str, Any] = {"weight_decay": 1e-4}


def _foreach_lamb(params: list[Tensor], max_norm: float | None) -> Any:
    return ForeachLAMB(params, LEARNING_RATE, 0.01, max_norm)


def _our_larc(params: list[Tensor], _: float | None) -> Any:
    return LARC(optimizers.FusedSGD(params, LEARNING_RATE, **_SGD), clip=False)


_LAMB = Contender(FOREACH, _foreach_lamb, clips=True)
_LARC = Contender(OURS, _our_larc, ours=True)
#: Name, our class, options, peer, and bytes per element without and with masters. LAMB clips.
#: With masters, a step reads the bf16 gradient, fp32 master and fp32 states, and writes master,
#: states and bf16 parameter. If a norm precedes the update, the norm's operands are read twice:
#: LAMB's clipping reads the gradient, and its norms all operands but the bf16 parameter.
_ROWS: tuple[tuple[str, Any, dict[str, Any], Contender, int | None, int], ...] = (
    ("sgd", optimizers.FusedSGD, _SGD, theirs(FUSED, torch.optim.SGD, fused=True, **_SGD), 20, 20),
    ("lamb", optimizers.FusedLAMB, _DECAY, _LAMB, 44, 42),
    (
        "mixed_precision_lamb",
        optimizers.FusedMixedPrecisionLamb,
        {"reduced_precision_dtype": torch.bfloat16, **_DECAY},
        _LAMB,
        None,
        42,
    ),
    (
        "novograd",
        optimizers.FusedNovoGrad,
        _DECAY,
        theirs(FOREACH, ForeachNovoGrad, **_DECAY),
        24,
        22,
    ),
    ("lars", optimizers.FusedLARS, _LARS, theirs(FOREACH, ForeachLARS, **_LARS), 28, 26),
    ("lion", optimizers.FusedLion, _DECAY, theirs(FOREACH, ForeachLion, **_DECAY), 20, 20),
    (
        "adagrad",
        optimizers.FusedAdagrad,
        {},
        theirs(FUSED, torch.optim.Adagrad, fused=True),
        20,
        20,
    ),
    (
        "adam",
        optimizers.FusedAdam,
        _DECAY,
        theirs(FUSED, torch.optim.AdamW, fused=True, **_DECAY),
        None,
        28,
    ),
)


def _cases(parameters: str) -> Iterator[StepCase]:
    for name, kind, options, peer, step, masters in _ROWS:
        mixed = kind is optimizers.FusedMixedPrecisionLamb
        keeps: dict[str, Any] = {} if mixed else {"master_weights": True}
        case = StepCase(
            f"{name}/step/{parameters}",
            load(parameters),
            (ours(kind, **options), peer),
            step or masters,
            clips=peer.clips,
            tolerance=TOLERANCE,
        )
        if step is not None:
            yield case
        if name == "sgd":
            yield dataclasses.replace(
                case,
                name=f"sgd/scale_clip/{parameters}",
                bytes_per_element=24,
                scales=True,
                clips=True,
            )
        yield dataclasses.replace(
            case,
            name=f"{name}/masters/{parameters}",
            contenders=(ours(kind, **options, **keeps), peer),
            bytes_per_element=masters,
            masters=True,
        )
    larc = (_LARC, theirs(FOREACH, ForeachLARC, **_LARS))
    yield StepCase(f"larc/step/{parameters}", load(parameters), larc, 40, tolerance=TOLERANCE)


CASES = (*_cases("bert_large_10_layers"), *_cases("resnet50"))
