# SPDX-License-Identifier: BSD-3-Clause
"""Every optimization level trains as the same loop written by hand, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.amp import (
    LEVELS,
    ByHand,
    MakeOptimizer,
    Overflow,
    make_batches,
    make_model,
    tensors_of,
    train_with,
)
from support.compare import assert_all_same_bits

from torchfuse.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.01),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=1e-2),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
DEFAULT_SCALES = {"O0": 1.0, "O1": "dynamic", "O2": "dynamic", "O3": 1.0}


def compare(
    amp: Any,
    level: str,
    make_optimizer: MakeOptimizer,
    loss_scale: float | str | None = None,
    overflows: Sequence[Overflow] = (),
    max_norm: float | None = None,
    device: str = "cpu",
    short: torch.dtype = torch.float16,
    **options: Any,
) -> ByHand:
    """Trains both ways for six steps; what the loop by hand has."""
    chosen = DEFAULT_SCALES[level] if loss_scale is None else loss_scale
    dynamic = chosen == "dynamic"
    if dynamic and short == torch.bfloat16:
        dynamic, chosen = False, 1.0
    scale = 2.0**16 if dynamic else float(chosen)
    batches = make_batches(6, device)
    by_hand = ByHand(level, make_optimizer, scale, dynamic, short, device, max_norm)
    by_hand.train(batches, overflows)

    model = make_model(device)
    optimizer = make_optimizer(list(model.parameters()))
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0, **options
    )
    train_with(amp, model, optimizer, batches, overflows, max_norm)
    assert_all_same_bits(
        tensors_of(model, list(amp.master_params(optimizer)), optimizer),
        tensors_of(by_hand.model, by_hand.masters, by_hand.optimizer),
    )
    assert amp._amp_state.loss_scalers[0].loss_scale() == by_hand.scale
    return by_hand


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_trains_as_by_hand(amp: Any, level: str, name: str, device: str) -> None:
    compare(amp, level, OPTIMIZERS[name], device=device)


@pytest.mark.parametrize("at", [0, 3, 5], ids="step{}".format)
@pytest.mark.parametrize("number", [0, 2, 5], ids="param{}".format)
@pytest.mark.parametrize("loss_scale", ["dynamic", "128.0", 1.0])
@pytest.mark.parametrize("level", LEVELS)
def test_overflow_anywhere(
    amp: Any, level: str, loss_scale: float | str, number: int, at: int
) -> None:
    by_hand = compare(amp, level, OPTIMIZERS["SGD"], loss_scale, [(at, number)])
    assert by_hand.skipped == ([at] if loss_scale == "dynamic" else [])
    finite = all(param.isfinite().all() for param in by_hand.params)
    assert finite == (loss_scale == "dynamic")


@pytest.mark.parametrize("name", ["FusedSGD", "FusedAdam", "FusedLAMB", "Adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_in_a_row(amp: Any, level: str, name: str) -> None:
    by_hand = compare(amp, level, OPTIMIZERS[name], overflows=[(0, 0), (1, 5), (4, 2)])
    assert by_hand.skipped == [0, 1, 4]
    assert by_hand.scale == 2.0**13


@pytest.mark.parametrize("name", ["FusedSGD", "FusedAdam", "SGD"])
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_master_params_clips_what_the_step_uses(amp: Any, level: str, name: str) -> None:
    by_hand = compare(amp, level, OPTIMIZERS[name], max_norm=0.05)
    norm = torch.stack([master.grad.float().norm() for master in by_hand.masters]).norm()
    assert norm < 0.051


@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("O1", {"patch_torch_functions_type": torch.bfloat16}),
        ("O2", {"cast_model_type": torch.bfloat16}),
        ("O3", {"cast_model_type": torch.bfloat16}),
    ],
)
def test_bf16_needs_no_loss_scale(amp: Any, level: str, options: dict[str, Any]) -> None:
    compare(amp, level, OPTIMIZERS["FusedAdam"], short=torch.bfloat16, **options)
    assert amp._amp_state.opt_properties.loss_scale == 1.0
    amp.initialize(make_model(), opt_level=level, loss_scale="dynamic", verbosity=0, **options)
    assert amp._amp_state.opt_properties.loss_scale == "dynamic"


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes(amp: Any, level: str) -> None:
    model = make_model()
    optimizer = FusedAdam(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    short = torch.float32 if level in ("O0", "O1") else torch.float16
    norm = torch.float16 if level == "O3" else torch.float32
    assert [model[i].weight.dtype for i in (0, 1, 3)] == [short, norm, short]
    assert model[1].running_mean.dtype == norm
    assert model(torch.ones(2, 6)).dtype == torch.float32
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
    # Masters come with the first scaled loss.
    pairs = zip(amp.master_params(optimizer), model.parameters(), strict=True)
    assert all(ours is the_models for ours, the_models in pairs)
    train_with(amp, model, optimizer, make_batches(1))
    master = torch.float16 if level == "O3" else torch.float32
    assert {param.dtype for param in amp.master_params(optimizer)} == {master}


def test_o1_computes_in_fp16_and_returns_fp32(amp: Any) -> None:
    seen: list[torch.dtype] = []
    model = make_model()
    model[2].register_forward_hook(lambda *given: seen.append(given[2].dtype))
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(torch.ones(2, 6)).dtype == torch.float32
    assert seen == [torch.float16]
    # Nothing outside of the model is under an autocast.
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
