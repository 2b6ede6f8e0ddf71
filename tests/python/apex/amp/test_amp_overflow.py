# SPDX-License-Identifier: BSD-3-Clause
"""The loss scale: overflows, skipped steps, growth, bounds, and when the host waits."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from support.amp import LEVELS, make_batches, make_model, tensors_of, train_with
from support.compare import assert_all_same_bits
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedSGD
from torchfuse.parallel import LARC

BATCHES = make_batches(4)


def prepared(amp: Any, level: str, kind: Any = FusedAdam, **options: Any) -> tuple[Any, Any]:
    model = make_model()
    arguments = {"momentum": 0.9} if kind in (FusedSGD, torch.optim.SGD) else {}
    if kind is torch.optim.Adam:
        arguments = {"eps": 1e-4}  # the default is 0 in fp16, for O3
    optimizer = kind(model.parameters(), lr=1e-2, **arguments)
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


@pytest.mark.parametrize(
    "kind", [FusedSGD, FusedAdam, FusedLAMB, torch.optim.SGD, torch.optim.Adam]
)
@pytest.mark.parametrize("level", LEVELS)
def test_a_skipped_step_changes_nothing(amp: Any, level: str, kind: Any) -> None:
    model, optimizer = prepared(amp, level, kind, loss_scale="dynamic")
    train_with(amp, model, optimizer, BATCHES[:2])
    before = tensors_of(model, list(amp.master_params(optimizer)), optimizer)
    model.eval()  # running statistics are the forward pass's
    train_with(amp, model, optimizer, BATCHES[2:3], overflows=[(0, 3)])
    after = tensors_of(model, list(amp.master_params(optimizer)), optimizer)
    assert any(name.startswith("state") for name in before)
    assert_all_same_bits(after, before)
    model.train()
    train_with(amp, model, optimizer, BATCHES[3:])
    with pytest.raises(AssertionError, match=r"model\.0\.weight"):
        assert_all_same_bits(
            tensors_of(model, list(amp.master_params(optimizer)), optimizer), before
        )


def test_one_line_for_each_skip(amp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = prepared(amp, "O2")
    amp._amp_state.verbosity = 1
    train_with(amp, model, optimizer, BATCHES, overflows=[(1, 0), (1, 3), (3, 5)])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "Gradient overflow: skipped a step of FusedAdam; the loss scale of loss scaler 0 is now "
        f"{scale}."
        for scale in (32768.0, 16384.0)
    ]
    amp._amp_state.verbosity = 0
    train_with(amp, model, optimizer, BATCHES[:1], overflows=[(0, 0)])
    assert capsys.readouterr().out == ""


def test_the_line_is_printed_on_rank_0(
    amp: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared(amp, "O1", verbosity=1)
    assert "opt_level O1" in capsys.readouterr().out
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, lines in ((1, 0), (0, 1)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        train_with(amp, model, optimizer, BATCHES[:1], overflows=[(0, 0)])
        assert len(capsys.readouterr().out.splitlines()) == lines


def test_nan_is_an_overflow(amp: Any) -> None:
    model, optimizer = prepared(amp, "O1")
    with amp.scale_loss(model(BATCHES[0][0]).sum() * math.nan, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


def test_a_loss_in_fp16_is_scaled_in_fp32(amp: Any) -> None:
    _, optimizer = prepared(amp, "O1")
    loss = torch.ones((), dtype=torch.float16)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert (scaled_loss.dtype, scaled_loss.item()) == (torch.float32, 2.0**16)


@pytest.mark.parametrize("to_none", [None, True, False])
@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD, torch.optim.SGD])
def test_zero_grad_reaches_model_and_masters(amp: Any, kind: Any, to_none: bool | None) -> None:
    model, optimizer = prepared(amp, "O2", kind)
    with amp.scale_loss(model(BATCHES[0][0]).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.zero_grad(**({} if to_none is None else {"set_to_none": to_none}))
    for param in optimizer._amp_stash.all_fp32_from_fp16_params:
        assert param.grad is None
    for param in optimizer._amp_stash.all_fp16_params:
        assert (param.grad is None) == (to_none is not False)
        assert param.grad is None or not param.grad.any()


@pytest.mark.parametrize(("options", "lowest"), [({}, 2.0**-24), ({"min_loss_scale": 128.0}, 128)])
def test_the_scale_has_a_floor(amp: Any, options: dict[str, Any], lowest: float) -> None:
    model, optimizer = prepared(amp, "O1", **options)
    before = tensors_of(model, [], optimizer)
    model.eval()
    train_with(amp, model, optimizer, BATCHES[:1] * 50, [(step, 0) for step in range(50)])
    assert amp._amp_state.loss_scalers[0].loss_scale() == lowest
    assert_all_same_bits(tensors_of(model, [], optimizer), before)
    train_with(amp, model, optimizer, BATCHES)
    assert all(param.isfinite().all() for param in model.parameters())


def test_the_scale_grows_to_its_maximum(amp: Any) -> None:
    model, optimizer = prepared(amp, "O1", max_loss_scale=2.0**18)
    scaler = amp._amp_state.loss_scalers[0]
    for expected in (2.0**17, 2.0**18, 2.0**18):
        scaler._unskipped = 1998
        before = scaler.loss_scale()
        train_with(amp, model, optimizer, BATCHES[:1])
        assert (scaler.loss_scale(), scaler._unskipped) == (before, 1999)
        train_with(amp, model, optimizer, BATCHES[:1])
        assert (scaler.loss_scale(), scaler._unskipped) == (expected, 0)
    train_with(amp, model, optimizer, BATCHES[:1])
    train_with(amp, model, optimizer, BATCHES[:1], overflows=[(0, 0)])
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**17, 0)
    # A low maximum also bounds the initial value.
    prepared(amp, "O1", max_loss_scale=64.0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 64.0


@pytest.mark.parametrize("scheduler_first", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_with(amp, model, optimizer, BATCHES[:1], overflows=[(0, 0)])
        scheduler.step()
        train_with(amp, model, optimizer, BATCHES[:1])
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
    assert backward.count == reads
    with HostReads() as step:
        optimizer.step()
        optimizer.zero_grad()
    assert step.count == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_larc_around_an_optimizer_of_amp(amp: Any, level: str, order: str) -> None:
    model = make_model()
    inside = torch.optim.SGD(model.parameters(), lr=0.1)
    if order == "before":
        optimizer: Any = LARC(inside)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    else:
        amp.initialize(model, inside, opt_level=level, verbosity=0)
        optimizer = LARC(inside)
    before = tensors_of(model, [], optimizer)
    train_with(amp, model.eval(), optimizer, BATCHES[:1], overflows=[(0, 0)])
    assert_all_same_bits(tensors_of(model, [], optimizer), before)
    train_with(amp, model, optimizer, BATCHES[:1])
    assert not torch.equal(model[0].weight, before["model.0.weight"])


def backward_alone(model: Any) -> None:
    cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()


def test_a_step_without_scale_loss_is_noticed(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2")
    message = (
        r"FusedAdam.step: expected gradients from amp\.scale_loss since the last step, got older "
        "ones or some of the model alone"
    )
    for _ in range(2):
        optimizer.zero_grad()
        backward_alone(model)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        train_with(amp, model, optimizer, BATCHES[:1])
    # Zeros are what an earlier zero_grad has left.
    for param in model.parameters():
        param.grad.zero_()
    optimizer.step()

    model, optimizer = prepared(amp, "O1")
    optimizer.step()
    backward_alone(model)
    with pytest.warns(UserWarning, match=r"expected gradients from amp\.scale_loss, got others"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("O1", r"FusedAdam.step: expected no closure with a dynamic loss scale, got one: its over"),
        ("O2", "FusedAdam.step: expected no closure with master weights, got one"),
    ],
)
def test_a_closure_whose_step_could_not_be_skipped_is_refused(
    amp: Any, level: str, message: str
) -> None:
    model, optimizer = prepared(amp, level)
    train_with(amp, model, optimizer, BATCHES[:1])
    optimizer.zero_grad()
    before = tensors_of(model, [], optimizer)
    for arguments in ((lambda: 3.0,), ()):
        keywords = {} if arguments else {"closure": lambda: 3.0}
        with pytest.raises(RuntimeError, match=message):
            optimizer.step(*arguments, **keywords)
    assert_all_same_bits(tensors_of(model, [], optimizer), before)


def test_a_closure_with_a_constant_scale_is_called(amp: Any) -> None:
    _, optimizer = prepared(amp, "O1", loss_scale=1.0)
    assert optimizer.step(lambda: 3.0) == 3.0


def test_an_overflow_in_the_other_parameters_of_a_group_counts(amp: Any) -> None:
    _, optimizer = prepared(amp, "O2")
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    with amp.scale_loss((extra * 1e35).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        assert scaled_loss.isinf()
    optimizer.step()
    assert extra.tolist() == [1.0, 1.0, 1.0]
