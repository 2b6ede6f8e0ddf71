# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of whole iterations verifies what it times."""

from __future__ import annotations

import pytest
import torch

from end_to_end import CONFIGURATIONS, Configuration, Training, contenders, verify
from suites.workloads import QUICK_WORKLOADS, Workload


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("workload", QUICK_WORKLOADS, ids=lambda entry: entry.name)
def test_contenders_that_compute_the_same(workload: Workload, configuration: Configuration) -> None:
    pair = contenders(configuration.masters)
    verify({c.name: Training(workload, configuration, c, 0) for c in pair}, "row")
