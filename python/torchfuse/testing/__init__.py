# SPDX-License-Identifier: BSD-3-Clause
"""Oracles, tolerances and the benchmark timer from torchfuse's tests."""

from torchfuse.testing.asserts import assert_bitwise_equal, assert_close_to_torch
from torchfuse.testing.bench import HostShare, interleave, summarize
from torchfuse.testing.optim_specs import OPTIM_SPECS, OptimSpec
from torchfuse.testing.reference import ReferenceOptimizer

__all__ = [
    "OPTIM_SPECS",
    "HostShare",
    "OptimSpec",
    "ReferenceOptimizer",
    "assert_bitwise_equal",
    "assert_close_to_torch",
    "interleave",
    "summarize",
]
