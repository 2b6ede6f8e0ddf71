# SPDX-License-Identifier: BSD-3-Clause
"""Tests that run on the pretended device only, and what they ask of its runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

SEEDS = (1, 2, 3, 4, 5)


def _runtime() -> ctypes.CDLL:
    try:
        runtime = ctypes.CDLL("libcudart.so.13")
        runtime.pretended_cuda_pending.restype = ctypes.c_ulonglong
    except (OSError, AttributeError):
        pytest.exit("expected the pretended device: use tools/on_pretended_cuda.sh", returncode=2)
    return runtime


RUNTIME = _runtime()


@pytest.fixture(autouse=True)
def _eager_before_and_after() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(0)
    RUNTIME.pretended_cuda_set_seed(0)


@pytest.fixture(params=(0, *SEEDS), ids=lambda seed: f"seed{seed}")
def seed(request: pytest.FixtureRequest) -> int:
    """Each order of time: eager, and the lazy ones."""
    RUNTIME.pretended_cuda_set_seed(request.param)
    return int(request.param)


@pytest.fixture
def pending() -> Callable[[], int]:
    """The number of pieces of work that are not done."""
    return lambda: int(RUNTIME.pretended_cuda_pending())


@pytest.fixture
def lazily() -> Callable[[Callable[[], float]], set[float]]:
    """The results of a program in all lazy orders."""

    def run(program: Callable[[], float]) -> set[float]:
        results = set()
        for seed in SEEDS:
            torch.cuda.synchronize()
            RUNTIME.pretended_cuda_set_seed(seed)
            results.add(program())
        return results

    return run
