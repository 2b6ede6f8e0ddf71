# SPDX-License-Identifier: BSD-3-Clause
"""Each operator once: on the device, and as the first of its process in a captured graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from every_op import CALLS, assert_as_on_the_cpu

PROGRAM = Path(__file__).with_name("every_op.py")


@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name: str, device: str) -> None:
    results = CALLS[name](device)()
    assert all(result.device.type == device for result in results)
    assert_as_on_the_cpu(name, results)


@pytest.mark.cuda
@pytest.mark.processes
@pytest.mark.parametrize("name", CALLS)
def test_may_be_captured_first(name: str) -> None:
    """Kernels are loaded when they are first launched, which a capture has to allow."""
    subprocess.run([sys.executable, PROGRAM, name], check=True, timeout=120)


def test_every_operator_is_called() -> None:
    """But for the collective, and for those that others consist of."""
    registered = {
        schema.name.removeprefix("torchfuse::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("torchfuse::")
    }
    parts = ("batch_norm_", "layer_norm_", "softmax_cross_entropy_", "all_reduce_sum_")
    assert {name for name in registered if not name.startswith(parts)} == set(CALLS)
