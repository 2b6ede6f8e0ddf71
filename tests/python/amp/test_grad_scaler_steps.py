# SPDX-License-Identifier: BSD-3-Clause
"""Whole iterations: torch's optimizers and ours, under torch's scaler and under ours."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits
from support.device_copies import Copy, recorded_copies
from support.pretended import device_behind_the_host
from torch import Tensor

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedSGD
from torchfuse.optimizers.options import ScalingRequest

OVERFLOWS = {2, 3, 7}


def nothing_is_asked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what a scaler asks of a step is gone, torch's and ours."""
    named = {"grad_scale", "found_inf"} & set(vars(optimizer))
    return not named and getattr(optimizer, "_scaling", None) is None


OPTIONS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "torch_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: FusedAdam(params, lr=0.01),
}


def run(
    scaler: Any, name: str, device: str, unscale: bool
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains with fixed gradients; returns all values at the end and the history of the scale."""
    params = make_params(device=device)
    optimizer = OPTIMIZERS[name](params)
    history = []
    for seed in range(10):
        scale = float(scaler.scale(torch.ones((), device=device)))
        set_grads(params, [scale * g for g in random_grads(params, seed)])
        if seed in OVERFLOWS:
            params[seed % len(params)].grad.view(-1)[-1] = math.inf
        before = snapshot(optimizer)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if seed in OVERFLOWS:
            after = snapshot(optimizer)
            unscaled = unscale or not hasattr(optimizer, "_step_supports_amp_scaling")
            kept = [name for name in before if not (unscaled and name.startswith("grad"))]
            assert_all_same_bits({n: after[n] for n in kept}, {n: before[n] for n in kept})
        scaler.update()
        history.append(scaler.get_scale())
        assert nothing_is_asked(optimizer)
    return snapshot(optimizer), history


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_iterations_are_those_under_torchs_scaler(name: str, unscale: bool, device: str) -> None:
    torchs = run(torch.amp.GradScaler(device, **OPTIONS), name, device, unscale)
    ours = run(GradScaler(device, **OPTIONS), name, device, unscale)
    assert ours[1] == torchs[1]
    assert len(set(ours[1])) > 2
    assert_all_same_bits(ours[0], torchs[0])


def started(**options: Any) -> tuple[GradScaler, FusedAdam, list[torch.nn.Parameter]]:
    """A scaler that has scaled a loss, and an optimizer with gradients."""
    params = make_params()
    set_grads(params, random_grads(params, 0))
    scaler = GradScaler("cpu", **options)
    scaler.scale(torch.ones(()))
    return scaler, FusedAdam(params), params


def test_sixteen_bit_gradients_stay_scaled_and_are_checked_inside_the_step(device: str) -> None:
    params = make_params(dtype=torch.float16, device=device)
    optimizer = FusedAdam(params, master_weights=True)
    scaler = GradScaler(device, init_scale=8.0)
    scaler.scale(torch.ones((), device=device))
    set_grads(params, random_grads(params, 0))
    before = [p.grad.clone() for p in params]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True))
    assert float(optimizer.state[params[0]]["step"]) == 1.0
    params[-1].grad.view(-1)[-1] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert float(optimizer.state[params[0]]["step"]) == 1.0
    assert scaler.get_scale() == 4.0


def test_the_scaler_does_not_keep_an_optimizer_alive() -> None:
    scaler, optimizer, _ = started()
    scaler.step(optimizer)
    scaler.update()
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None


# What is lent to an optimizer for a step, taken back, and refused.


def test_closures_are_refused_by_place_too() -> None:
    scaler, optimizer, params = started()
    with pytest.raises(RuntimeError, match=r"^Closure use is not currently supported"):
        scaler.step(optimizer, lambda: 0.0)
    scaler.step(optimizer, None)
    assert float(optimizer.state[params[0]]["step"]) == 1.0


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
def test_a_users_own_grad_scale_is_one_more_factor(scaler_class: Any) -> None:
    params, reference = make_params(), make_params()
    ours, plain = FusedAdam(params), FusedAdam(reference)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    grads = random_grads(params, 0)
    set_grads(params, [8.0 * g for g in grads])
    set_grads(reference, grads)
    ours.grad_scale = torch.tensor(2.0)
    scaler.step(ours)
    plain.step()
    assert_all_same_bits(
        {k: v for k, v in snapshot(ours).items() if not k.startswith("grad")},
        {k: v for k, v in snapshot(plain).items() if not k.startswith("grad")},
    )


def test_an_error_in_the_step_returns_what_was_lent() -> None:
    scaler, optimizer, params = started()

    def fail(*_: Any) -> None:
        raise KeyError("hook")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="hook"):
        scaler.step(optimizer)
    handle.remove()
    assert nothing_is_asked(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert float(optimizer.state[params[0]]["step"]) == 1.0


@pytest.mark.parametrize("how", ["a hook drops the gradients", "a step of its own"])
def test_a_step_that_checks_nothing_found_nothing(how: str) -> None:
    """Whatever the step before it has found: the flag is the same."""

    class Absent(FusedAdam):
        reports = True

        def step(self, closure: Any = None) -> Any:
            return super().step(closure) if self.reports else None

    params = make_params()
    optimizer = Absent(params)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for overflow in (True, False):
        set_grads(params, random_grads(params, 0))
        if overflow:
            assert params[0].grad is not None
            params[0].grad[0] = math.inf
        elif how == "a step of its own":
            optimizer.reports = False
        else:
            optimizer.register_step_pre_hook(lambda opt, *_: opt.zero_grad())
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step_skipped() is overflow
        assert scaler.get_scale() == 4.0


def test_schedulers_see_the_step(recwarn: pytest.WarningsRecorder) -> None:
    scaler, optimizer, _ = started()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler.step(optimizer)
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_a_wrapper_around_ours_gets_torchs_protocol() -> None:
    class Wrapper(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def __init__(self, inner: FusedAdam) -> None:
            self.inner = inner
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.inner.grad_scale, self.inner.found_inf = self.grad_scale, self.found_inf
            self.inner.step()

    scaler, optimizer, params = started(init_scale=8.0)
    params[0].grad[0] = math.inf
    before = [p.detach().clone() for p in params]
    scaler.step(Wrapper(optimizer))
    scaler.update()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert scaler.get_scale() == 4.0


# Programs of two models that feed each other's loss, each with an optimizer of its own.


class Pair:
    """Two models and their optimizers, torch's and ours."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        momentum = torch.optim.SGD(self.first.parameters(), lr=0.1, momentum=0.9)
        self.optimizers = [momentum, FusedAdam(self.second.parameters(), lr=0.01)]

    def params(self) -> list[Tensor]:
        return [*self.first.parameters(), *self.second.parameters()]

    def outputs(self, step: int) -> tuple[Tensor, Tensor]:
        data = torch.linspace(-1, 1, 8).view(2, 4) * (1.0 + step)
        return self.first(data), self.second(data)


def clipping(pair: Pair, step: int, scaler: Any) -> None:
    first, second = pair.outputs(step)
    scaler.scale((first * second).square().mean()).backward()
    for optimizer in pair.optimizers:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(pair.params(), 0.01)


def one_unscaled(pair: Pair, step: int, scaler: Any) -> None:
    """Only one of the two optimizers is unscaled by hand."""
    first, second = pair.outputs(step)
    scaler.scale((2 * first + 3 * second).square().mean()).backward(retain_graph=True)
    scaler.scale((3 * first - 5 * second).square().mean()).backward()
    scaler.unscale_(pair.optimizers[step % 2])


def train(scaler: Any, backward: Any) -> tuple[dict[str, Tensor], list[float]]:
    pair, scales = Pair(), []
    for step in range(6):
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        factor = math.inf if step in (1, 4) else 1.0
        hook = pair.first.weight.register_hook(lambda grad, factor=factor: grad * factor)
        backward(pair, step, scaler)
        hook.remove()
        for optimizer in pair.optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {str(i): param.detach() for i, param in enumerate(pair.params())}, scales


@pytest.mark.parametrize("program", [clipping, one_unscaled])
def test_a_program_trains_as_under_torchs_scaler(program: Any) -> None:
    torchs = train(torch.amp.GradScaler("cpu", **OPTIONS), program)
    ours = train(GradScaler("cpu", **OPTIONS), program)
    assert ours[1] == torchs[1]
    assert len(set(ours[1])) > 1
    assert all(value.isfinite().all() for value in ours[0].values())
    assert_all_same_bits(ours[0], torchs[0])


@pytest.mark.cuda
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("overflow", ["cpu", "cuda", "both", "none"])
def test_gradients_on_two_devices(overflow: str, unscale: bool) -> None:
    """What either device finds is seen by both.

    torch's scaler is no oracle here: it reads 1/scale and the other device's flag on the host while
    their copies are under way, so on a device that is behind it may miss the overflow.
    """
    params = [torch.nn.Parameter(torch.ones(5, device=device)) for device in ("cpu", "cuda")]
    optimizer = OPTIMIZERS["sgd"](params)
    scaler = GradScaler("cuda", init_scale=8.0)
    with device_behind_the_host():
        scaler.scale(torch.zeros((), device="cuda"))
        for param, device in zip(params, ("cpu", "cuda"), strict=True):
            param.grad = torch.full_like(param, 2.0)
            if overflow in (device, "both"):
                param.grad[1] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = [param.detach().cpu() for param in params]
    assert scaler.get_scale() == (8.0 if overflow == "none" else 4.0)
    # The same optimizer, without a scaler.
    plain = [torch.nn.Parameter(torch.ones(5, device=param.device)) for param in params]
    if overflow == "none":
        for param in plain:
            param.grad = torch.full_like(param, 2.0 / 8.0)
        OPTIMIZERS["sgd"](plain).step()
    for value, expected in zip(moved, plain, strict=True):
        assert torch.equal(value, expected.detach().cpu())


# A scale on CUDA over gradients on the host, as with parameters that are offloaded. The host reads
# such copies at once, so each must be one that it waits for. The tensors only pretend to be on
# CUDA: what is seen is how each copy is asked for.

TO_THE_HOST = Copy("cuda", "cpu", non_blocking=False)


@pytest.fixture
def copies() -> Iterator[list[Copy]]:
    with recorded_copies() as recorded:
        yield recorded


def scaler_on(device: str) -> GradScaler:
    """A scaler whose scale exists, though nothing is computed on CUDA."""
    scaler = GradScaler("cpu")
    scaler._scale = torch.ones((), device=device)
    scaler._growth_tracker = torch.ones((), dtype=torch.int32, device=device)
    return scaler


def make_optimizer() -> FusedAdam:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return FusedAdam([param], lr=0.1)


def to_the_host(copies: list[Copy]) -> list[Copy]:
    return [copy for copy in copies if copy.target == "cpu"]


@pytest.mark.parametrize(
    "outputs",
    [lambda output: output, lambda output: [output], lambda output: iter([output])],
    ids=["tensor", "list", "iterator"],
)
def test_scale_of_outputs_on_the_host(outputs: Callable[[Any], Any], copies: list[Copy]) -> None:
    scaled = scaler_on("cuda").scale(outputs(torch.ones(())))
    result = scaled if isinstance(scaled, torch.Tensor) else next(iter(scaled))
    assert result.device.type == "cpu"
    assert copies == [TO_THE_HOST]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, GradScaler], ids=["torchs", "ours"])
def test_a_step_of_a_programs_own_is_told_scale_and_flag(scaler_type: Any, unscale: bool) -> None:
    told: list[tuple[Any, float]] = []

    class Own(FusedAdam):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            scale = getattr(self, "grad_scale", None)
            told.append((None if scale is None else float(scale), float(self.found_inf)))

    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = Own([param]), scaler_type("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((2,), 32.0)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert told == [(None if unscale else 16.0, 0.0)]


def test_a_programs_own_scale_is_for_one_step() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = FusedSGD([param], lr=1.0), GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    optimizer.grad_scale = torch.tensor(4.0)
    for expected in (-1.0, -5.0):  # by 2 and 4, then by 2 alone
        param.grad = torch.full((2,), 8.0)
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [expected] * 2


def test_unscale_and_step_of_gradients_on_the_host(
    copies: list[Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is told the loss scale or the flag: of this missing, a step is not skipped."""
    asked: list[ScalingRequest] = []
    monkeypatch.setattr(FusedAdam, "step", lambda self: asked.append(self._scaling))
    scaler, optimizer = scaler_on("cuda"), make_optimizer()
    scaler.step(make_optimizer())
    assert asked[-1].grad_scale.device.type == "cpu"
    assert to_the_host(copies) == [TO_THE_HOST]
    scaler.unscale_(optimizer)
    assert to_the_host(copies) == [TO_THE_HOST] * 2
    scaler.step(optimizer)
    assert asked[-1].found_inf.device.type == "cpu"
    assert to_the_host(copies) == [TO_THE_HOST] * 3


def test_towards_cuda_nothing_waits(copies: list[Copy]) -> None:
    scaler_on("cuda")._core.combine([torch.ones(()), torch.ones(())])
    assert copies == [Copy("cpu", "cuda", non_blocking=True)] * 2
