# SPDX-License-Identifier: BSD-3-Clause
"""torchfuse.amp.autocast against torch.amp.autocast: as a region, a decorator and compiled."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchfuse.amp import GradScaler, autocast

Region = Callable[..., Any]

FIELDS = ("device", "fast_dtype", "_enabled", "_cache_enabled")


def state() -> tuple[bool, torch.dtype, bool]:
    """What autocast's regions change."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_is_torchs_class_with_a_default() -> None:
    assert issubclass(autocast, torch.amp.autocast)
    ours, torchs = (inspect.signature(c).parameters for c in (autocast, torch.amp.autocast))
    assert list(ours) == list(torchs)
    assert ours["device_type"].default is None
    rest = list(ours)[1:]
    assert [ours[name].default for name in rest] == [torchs[name].default for name in rest]


@pytest.mark.usefixtures("without_cuda")
def test_without_cuda_it_is_the_cpu_in_bf16_and_says_nothing(model: torch.nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region = autocast()
        scaler = GradScaler()
        with region:
            assert state() == (True, torch.bfloat16, True)
            assert model(torch.ones(2, 4)).dtype is torch.bfloat16
    assert (scaler._device, scaler.is_enabled()) == ("cpu", True)


@pytest.mark.cuda
def test_with_cuda_it_is_cuda_in_fp16() -> None:
    model = torch.nn.Linear(4, 4).cuda()
    with autocast():
        assert model(torch.ones(2, 4, device="cuda")).dtype is torch.float16
    scaler = GradScaler()
    assert (scaler._device, scaler.is_enabled()) == ("cuda", True)


@pytest.mark.parametrize(
    "arguments",
    [(), (torch.float16,), (None, False), (None, True, False), (torch.float16, True, True)],
    ids=str,
)
def test_arguments_mean_what_they_mean_in_torch(arguments: tuple[Any, ...]) -> None:
    before = state()
    inside = []
    for kind in (autocast, torch.amp.autocast):
        with contextlib.suppress(KeyError), kind(torch.device("cpu").type, *arguments):
            inside.append(state())
            raise KeyError
        assert state() == before, "an error ends the region"
    assert inside[0] == inside[1]
    assert autocast(torch.device("cpu")).device == "cpu"


@pytest.mark.parametrize("make", [copy.copy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_as_torchs(make: Callable[[Any], Any], model: torch.nn.Module) -> None:
    arguments = ("cpu", torch.float16, True, False)
    ours, torchs = make(autocast(*arguments)), make(torch.amp.autocast(*arguments))
    assert type(ours) is autocast
    assert [getattr(ours, f) for f in FIELDS] == [getattr(torchs, f) for f in FIELDS]
    with ours:
        assert model(torch.ones(2, 4)).dtype is torch.float16


@pytest.mark.parametrize(
    ("make", "got", "told"),
    [
        (autocast, False, "autocast: expected device_type to be .* got False.*: enabled=False"),
        (autocast, torch.float16, r"by name: dtype=torch\.float16\.$"),
        (autocast, lambda: None, r"decorator with parentheses: @autocast\(\)\.$"),
        (GradScaler, 1024.0, "GradScaler: expected device to be .* 1024.0.*: init_scale=1024.0"),
        (GradScaler, True, r"by name: enabled=True\.$"),
    ],
)
def test_what_stands_in_the_place_of_the_device(make: Any, got: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make(got)


# --- Functions that use it, compiled and not ---------------------------------------------------


def regions_within(region: Region, model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        with region("cpu"):
            first = model(x)
            with region("cpu", enabled=False):
                second = model(first.float())
        return second + model(x)

    return function


def region_of_the_program(region: Region, model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    whole = region("cpu")

    def function(x: Tensor) -> Tensor:
        with whole:
            return model(x)

    return function


def decorator(region: Region, model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    inner = region("cpu")(model.forward)
    return lambda x: inner(x) + 1


def decorator_inside(region: Region, model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: region("cpu")(model.forward)(x)


@pytest.mark.parametrize(
    "make", [regions_within, region_of_the_program, decorator, decorator_inside]
)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_results_and_gradients_are_torchs(
    make: Callable[[Region, torch.nn.Module], Callable[[Tensor], Tensor]],
    compiled: bool,
    model: torch.nn.Module,
) -> None:
    x = torch.randn(2, 4)
    before = state()
    found = []
    for region in (torch.amp.autocast, autocast):
        function = make(region, model)
        if compiled:
            torch.compiler.reset()
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            result = function(x)
            result.float().sum().backward()
        assert state() == before
        found.append([result, *(p.grad for p in model.parameters())])
    for ours, torchs in zip(found[1], found[0], strict=True):
        assert ours.dtype is torchs.dtype
        assert torch.equal(ours, torchs)


@pytest.mark.usefixtures("without_cuda")
def test_a_compiled_function_may_leave_the_device_open(model: torch.nn.Module) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        with autocast():
            result: Tensor = model(x)
        return result

    torch.compiler.reset()
    assert function(torch.ones(2, 4)).dtype is torch.bfloat16


def test_a_graph_break_inside_the_region_changes_no_result(model: torch.nn.Module) -> None:
    def function(x: Tensor) -> Tensor:
        with autocast("cpu"):
            y = model(x)
            torch._dynamo.graph_break()
            return model(y)

    expected = function(torch.ones(2, 4))
    torch.compiler.reset()
    result = torch.compile(function, backend="eager")(torch.ones(2, 4))
    assert result.dtype is torch.bfloat16
    assert torch.equal(result, expected)
    assert not torch.is_autocast_enabled("cpu")
