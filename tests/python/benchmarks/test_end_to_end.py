# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of whole iterations verifies what it times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from end_to_end import CONFIGURATIONS, Configuration, Training, contenders, verify
from suites.steps import FUSED, OURS, theirs
from suites.workloads import QUICK_WORKLOADS, Workload


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(workload: Workload, configuration: Configuration, *peers: Any) -> dict[str, Training]:
    ours, theirs = contenders(configuration.masters)
    return {c.name: Training(workload, configuration, c, 0) for c in (ours, *(peers or (theirs,)))}


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("workload", QUICK_WORKLOADS, ids=lambda entry: entry.name)
def test_contenders_that_compute_the_same(workload: Workload, configuration: Configuration) -> None:
    verify(made(workload, configuration), "row")


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("option", [{"lr": 1.001e-3}, {"betas": (0.9005, 0.999)}])
def test_a_contender_that_computes_something_else(
    configuration: Configuration, option: dict[str, Any]
) -> None:
    wrong = theirs(FUSED, torch.optim.AdamW, fused=True, weight_decay=0.01, **option)
    with pytest.raises(RuntimeError, match=rf"row: expected .* of {OURS} within .* of {FUSED}'s"):
        verify(made(QUICK_WORKLOADS[1], configuration, wrong), "row")
