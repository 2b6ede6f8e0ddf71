# SPDX-License-Identifier: BSD-3-Clause
"""Every level trains as the same loop by hand, bit for bit; what the loss scale does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.amp import (
    LEVELS,
    OPTIMIZERS,
    ByHand,
    Overflow,
    all_tensors,
    backward,
    make_batches,
    make_model,
    prepared,
    tensors_of,
    train_with,
)
from support.compare import assert_all_same_bits
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from torchfuse.apex.amp.loss_scaler import LossScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import LARC

DEFAULT_SCALES = {"O0": 1.0, "O1": "dynamic", "O2": "dynamic", "O3": 1.0}
BATCHES = make_batches(4)


def compare(
    amp: Any,
    level: str,
    name: str = "FusedAdam",
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
    by_hand = ByHand(level, OPTIMIZERS[name], scale, dynamic, short, device, max_norm)
    by_hand.train(batches, overflows)

    model, optimizer = prepared(amp, level, name, device, loss_scale=loss_scale, **options)
    train_with(amp, model, optimizer, batches, overflows, max_norm)
    expected = tensors_of(by_hand.model, by_hand.masters, by_hand.optimizer)
    assert_all_same_bits(all_tensors(amp, model, optimizer), expected)
    assert amp._amp_state.loss_scalers[0].loss_scale() == by_hand.scale
    return by_hand


# Levels.


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_trains_as_by_hand(amp: Any, level: str, name: str, device: str) -> None:
    compare(amp, level, name, device=device)


@pytest.mark.parametrize("name", ["FusedAdam", "SGD"])
@pytest.mark.parametrize("loss_scale", ["dynamic", "128.0"])
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_anywhere_skips_the_step_if_the_scale_is_dynamic(
    amp: Any, level: str, loss_scale: str, name: str
) -> None:
    dynamic = loss_scale == "dynamic"
    overflows = [(0, 0), (1, 5), (4, 2)] if dynamic else [(3, 5)]
    by_hand = compare(amp, level, name, loss_scale, overflows)
    assert by_hand.skipped == ([0, 1, 4] if dynamic else [])
    assert by_hand.scale == (2.0**13 if dynamic else 128.0)
    assert all(param.isfinite().all() for param in by_hand.params) == dynamic


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_master_params_clips_what_the_step_uses(amp: Any, level: str) -> None:
    by_hand = compare(amp, level, max_norm=0.05)
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
    compare(amp, level, short=torch.bfloat16, **options)
    assert amp._amp_state.opt_properties.loss_scale == 1.0
    amp.initialize(make_model(), opt_level=level, loss_scale="dynamic", verbosity=0, **options)
    assert amp._amp_state.opt_properties.loss_scale == "dynamic"


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes(amp: Any, level: str) -> None:
    model, optimizer = prepared(amp, level)
    seen: list[torch.dtype] = []
    model[2].register_forward_hook(lambda *given: seen.append(given[2].dtype))
    short = torch.float32 if level in ("O0", "O1") else torch.float16
    norm = torch.float16 if level == "O3" else torch.float32
    assert [model[i].weight.dtype for i in (0, 1, 3)] == [short, norm, short]
    assert model[1].running_mean.dtype == norm
    assert model(torch.ones(2, 6)).dtype == torch.float32
    assert seen == [torch.float32 if level == "O0" else torch.float16]
    # Nothing outside of the model is under an autocast.
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
    # Masters come with the first scaled loss.
    pairs = zip(amp.master_params(optimizer), model.parameters(), strict=True)
    assert all(ours is the_models for ours, the_models in pairs)
    train_with(amp, model, optimizer, make_batches(1))
    master = torch.float16 if level == "O3" else torch.float32
    assert {param.dtype for param in amp.master_params(optimizer)} == {master}


# The loss scale.


def test_one_line_for_each_skip_is_printed_on_rank_0(
    amp: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared(amp, "O2")
    amp._amp_state.verbosity = 1
    train_with(amp, model, optimizer, BATCHES, overflows=[(1, 0), (1, 3), (3, 5)])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "Gradient overflow: skipped a step of FusedAdam; the loss scale of loss scaler 0 is now "
        f"{scale}."
        for scale in (32768.0, 16384.0)
    ]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for verbosity, rank, count in ((0, 0, 0), (1, 1, 0), (1, 0, 1)):
        amp._amp_state.verbosity = verbosity
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        train_with(amp, model, optimizer, BATCHES[:1], overflows=[(0, 0)])
        assert len(capsys.readouterr().out.splitlines()) == count


def test_nan_is_an_overflow_and_an_fp16_loss_is_scaled_in_fp32(amp: Any) -> None:
    model, optimizer = prepared(amp, "O1")
    loss = torch.ones((), dtype=torch.float16, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert (scaled_loss.dtype, scaled_loss.item()) == (torch.float32, 2.0**16)
        scaled_loss.backward()
    backward(amp, model(BATCHES[0][0]).sum() * math.nan, optimizer)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


@pytest.mark.parametrize("to_none", [None, True, False])
@pytest.mark.parametrize("name", ["FusedAdam", "SGD"])
def test_zero_grad_reaches_model_and_masters(amp: Any, name: str, to_none: bool | None) -> None:
    model, optimizer = prepared(amp, "O2", name)
    backward(amp, model(BATCHES[0][0]).mean(), optimizer)
    assert all(param.grad is not None for param in model.parameters())
    optimizer.zero_grad(**({} if to_none is None else {"set_to_none": to_none}))
    for param in optimizer._amp_stash.all_fp32_from_fp16_params:
        assert param.grad is None
    for param in optimizer._amp_stash.all_fp16_params:
        assert (param.grad is None) == (to_none is not False)
        assert param.grad is None or not param.grad.any()


@pytest.mark.parametrize(
    ("options", "lowest", "highest"),
    [({}, 2.0**-24, 2.0**24), ({"min_loss_scale": 128.0, "max_loss_scale": 2.0**18}, 128, 2.0**18)],
)
def test_the_scale_stays_between_its_bounds(
    amp: Any, options: dict[str, Any], lowest: float, highest: float
) -> None:
    prepared(amp, "O1", **options)
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler._scale_seq_len == 2000
    scaler._scale_seq_len = 3
    for overflows, expected in ((0, highest), (1, highest / 2), (50, lowest), (1, lowest)):
        for _ in range(overflows or 50):
            scaler.clear_overflow_state()
            scaler._overflow_buf.fill_(min(overflows, 1))
            assert scaler.update_scale() == (overflows > 0)
        assert scaler.loss_scale() == expected
    # Also the initial value, by default at most apex's largest scale.
    assert LossScaler("dynamic", max_loss_scale=64.0).loss_scale() == 64.0
    assert LossScaler("dynamic", init_scale=2.0**30).loss_scale() == 2.0**24


def test_the_scale_grows_after_passes_without_overflow(amp: Any) -> None:
    model, optimizer = prepared(amp, "O1")
    scaler = amp._amp_state.loss_scalers[0]
    for overflows, before, expected in (
        ([], 1998, (2.0**16, 1999)),
        ([], 1999, (2.0**17, 0)),
        ([(0, 0)], 1, (2.0**16, 0)),
    ):
        scaler._unskipped = before
        train_with(amp, model, optimizer, BATCHES[:1], overflows)
        assert (scaler.loss_scale(), scaler._unskipped) == expected


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("level", "scheduler_first"), [("O1", True), ("O2", False), ("O2", True)])
def test_schedulers_accept_a_skipped_first_step(
    amp: Any, level: str, scheduler_first: bool
) -> None:
    model = make_model()
    optimizer = FusedAdam(model.parameters(), lr=1.0)

    def schedule() -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    scheduler = schedule() if scheduler_first else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scheduler = scheduler or schedule()
    for overflows in ([(0, 0)], []):
        train_with(amp, model, optimizer, BATCHES[:1], overflows)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


class HostReads(TorchDispatchMode):
    """Counts reads of a tensor's value."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("loss_scale", "reads"), [("dynamic", 1), (128.0, 0)])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_host_waits_once_at_most(
    amp: Any, level: str, loss_scale: float | str, reads: int
) -> None:
    model, optimizer = prepared(amp, level, loss_scale=loss_scale)
    train_with(amp, model, optimizer, BATCHES[:1])
    loss = cross_entropy(model(BATCHES[0][0]), BATCHES[0][1])
    with HostReads() as backward, amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    with HostReads() as step:
        optimizer.step()
        optimizer.zero_grad()
    assert (backward.count, step.count) == (reads, 0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_around_an_optimizer_of_amp(amp: Any, level: str) -> None:
    model, inside = prepared(amp, level, "SGD")
    optimizer = LARC(inside)
    before = tensors_of(model, [], optimizer)
    train_with(amp, model.eval(), optimizer, BATCHES[:1], overflows=[(0, 0)])
    assert_all_same_bits(tensors_of(model, [], optimizer), before)
    train_with(amp, model, optimizer, BATCHES[:1])
    assert not torch.equal(model[0].weight, before["model.0.weight"])


def test_an_overflow_in_the_other_parameters_of_a_group_counts(amp: Any) -> None:
    _, optimizer = prepared(amp, "O2")
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    with amp.scale_loss((extra * 1e35).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        assert scaled_loss.isinf()
    optimizer.step()
    assert extra.tolist() == [1.0, 1.0, 1.0]


def test_the_device_is_that_of_the_model_not_of_the_input(amp: Any, device: str) -> None:
    """It may move after initialize; an input on the host, such as a length, does not choose."""
    seen: list[bool] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 2))

        def forward(self, length: torch.Tensor) -> torch.Tensor:
            seen.extend(torch.is_autocast_enabled(name) for name in ("cpu", "cuda"))
            return torch.mm(self.weight, self.weight) * int(length)

    model = amp.initialize(Net(), opt_level="O1", verbosity=0).to(device)
    model(torch.tensor(3))
    assert seen == [device == "cpu", device == "cuda"]
