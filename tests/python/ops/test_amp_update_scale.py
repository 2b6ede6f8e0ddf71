# SPDX-License-Identifier: BSD-3-Clause
"""torch.ops.torchfuse.amp_update_scale_ against torch's operator and a written-out hysteresis."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torchfuse


def make_state(scale: float, tracker: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(scale, device=device),
        torch.tensor(tracker, dtype=torch.int32, device=device),
    )


def rule(growth: float = 2.0, backoff: float = 0.5, interval: int = 3) -> dict[str, Any]:
    return {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}


@pytest.mark.parametrize("growth", [2.0, 1.5])
@pytest.mark.parametrize("backoff", [0.5, 0.3])
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_equals_torchs_operator_over_a_run(
    growth: float, backoff: float, interval: int, device: str
) -> None:
    ours = make_state(1000.0, device=device)
    torchs = make_state(1000.0)
    flags = [0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    for flag in flags:
        found_inf = torch.tensor(float(flag))
        torch._amp_update_scale_(*torchs, found_inf, growth, backoff, interval)
        torch.ops.torchfuse.amp_update_scale_(
            *ours, found_inf.to(device), **rule(growth, backoff, interval)
        )
        assert float(ours[0]) == float(torchs[0])
        assert int(ours[1]) == int(torchs[1])


def test_scale_does_not_grow_past_fp32(device: str) -> None:
    scale, tracker = make_state(3e38, device=device)
    zero = torch.zeros((), device=device)
    for _ in range(5):
        torch.ops.torchfuse.amp_update_scale_(scale, tracker, zero, **rule(interval=1))
    assert float(scale) == float(torch.tensor(3e38))
    assert int(tracker) == 0


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis(hysteresis: int, device: str) -> None:
    """The scale backs off from the n-th overflow in a row on; a clean step refills."""
    scale, tracker = make_state(1024.0, device=device)
    left = torch.tensor(hysteresis, dtype=torch.int32, device=device)
    expected, remaining, successes = 1024.0, hysteresis, 0
    for flag in itertools.chain([1, 1, 1, 1], [0, 0], [1], [0, 0, 0], [1, 1, 1], [0] * 6):
        torch.ops.torchfuse.amp_update_scale_(
            scale,
            tracker,
            torch.tensor(float(flag), device=device),
            **rule(),
            hysteresis_tracker=left,
            hysteresis=hysteresis,
        )
        if flag:
            remaining, successes = remaining - 1, 0
            expected *= 0.5 if remaining <= 0 else 1.0
        else:
            remaining, successes = hysteresis, successes + 1
            if successes == 3:
                expected, successes = expected * 2, 0
        assert (float(scale), int(tracker)) == (expected, successes)


def test_bounds_hold_the_scale(device: str) -> None:
    scale, tracker = make_state(6.0, device=device)
    flag = torch.ones((), device=device)
    seen = []
    for overflow in [1, 1, 1, 0, 0, 0, 0]:
        flag.fill_(overflow)
        torch.ops.torchfuse.amp_update_scale_(
            scale, tracker, flag, **rule(interval=1), min_scale=2.0, max_scale=10.0
        )
        seen.append(float(scale))
    assert seen == [3.0, 2.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_counts_and_history_of_a_static_scale(device: str) -> None:
    """The ring holds the last three of five updates; nothing moves."""
    scale, tracker = make_state(16.0, 1, device=device)
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    history = torch.full((3, 2), -1.0, device=device)
    left = torch.tensor(2, dtype=torch.int32, device=device)
    flags = [0.0, math.nan, 0.0, 2.0, 1.0]
    for index, flag in enumerate(flags):
        torch.ops.torchfuse.amp_update_scale_(
            scale,
            tracker,
            torch.tensor(flag, device=device),
            **rule(interval=1),
            hysteresis_tracker=left,
            hysteresis=2,
            dynamic=False,
            counts=counts,
            history=history,
        )
        overflows = sum(flag != 0.0 for flag in flags[: index + 1])
        assert counts.tolist() == [index + 1, overflows, int(flag != 0.0)]
    assert history.tolist() == [[16.0, 1.0], [16.0, 1.0], [16.0, 0.0]]
    assert (float(scale), int(tracker), int(left)) == (16.0, 1, 2)


def test_history_holds_the_scale_before_each_update(device: str) -> None:
    scale, tracker = make_state(16.0, device=device)
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    history = torch.zeros(4, 2, device=device)
    for flag in [1.0, 1.0, 0.0]:
        torch.ops.torchfuse.amp_update_scale_(
            scale,
            tracker,
            torch.tensor(flag, device=device),
            **rule(interval=1),
            counts=counts,
            history=history,
        )
    assert history.tolist() == [[16.0, 1.0], [8.0, 1.0], [4.0, 0.0], [0.0, 0.0]]
    assert float(scale) == 8.0


def test_shapes_and_versions() -> None:
    scale, tracker = torch.tensor([8.0]), torch.tensor([0], dtype=torch.int32)
    versions = scale._version, tracker._version
    torch.ops.torchfuse.amp_update_scale_(scale, tracker, torch.ones(1, 1), **rule())
    assert scale.tolist() == [4.0]
    assert scale._version > versions[0]
    assert tracker._version > versions[1]


def test_wrapper_function_is_the_op() -> None:
    scale, tracker = make_state(8.0)
    torchfuse.ops.amp_update_scale_(scale, tracker, torch.ones(()), **rule())
    assert float(scale) == 4.0


INT = torch.zeros((), dtype=torch.int32)


@pytest.mark.parametrize(
    ("tensors", "extra", "message"),
    [
        ((torch.ones(2), INT, torch.zeros(())), {}, "scale to hold one element of dtype Float"),
        ((torch.ones(()).double(), INT, torch.zeros(())), {}, "scale to hold one element"),
        ((torch.ones(()), torch.zeros(()), torch.zeros(())), {}, "growth_tracker to hold one"),
        ((torch.ones(()), INT, INT), {}, "found_inf to hold one element of dtype Float"),
        ((torch.ones(()), INT, torch.zeros(())), {"hysteresis": 0}, "hysteresis to be a number"),
        ((torch.ones(()), INT, torch.zeros(())), {"hysteresis": 2}, "hysteresis_tracker to be a"),
        (
            (torch.ones(()), INT, torch.zeros(())),
            {"hysteresis": 2, "hysteresis_tracker": torch.zeros(())},
            "hysteresis_tracker to hold one element of dtype Int",
        ),
        (
            (torch.ones(()), INT, torch.zeros(())),
            {"min_scale": 4.0, "max_scale": 2.0},
            "0 <= min_scale <= max_scale within fp32, got min_scale 4 and max_scale 2",
        ),
        (
            (torch.ones(()), INT, torch.zeros(())),
            {"min_scale": math.nan},
            "0 <= min_scale <= max_scale",
        ),
        (
            (torch.ones(()), INT, torch.zeros(())),
            {"counts": torch.zeros(3)},
            r"counts to be a contiguous tensor of shape \[3\] and dtype Long, got one of shape",
        ),
        (
            (torch.ones(()), INT, torch.zeros(())),
            {"counts": torch.zeros(3, dtype=torch.int64), "history": torch.zeros(2, 4).T},
            r"history to be a contiguous tensor of shape \[n, 2\] and dtype Float",
        ),
        (
            (torch.ones(()), INT, torch.zeros(())),
            {"history": torch.zeros(4, 2)},
            "counts to be a tensor when there is a history, got none",
        ),
    ],
)
def test_bad_arguments(tensors: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"amp_update_scale_: expected {message}"):
        torch.ops.torchfuse.amp_update_scale_(*(t.clone() for t in tensors), **rule(), **extra)
