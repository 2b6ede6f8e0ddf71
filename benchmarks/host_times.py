# SPDX-License-Identifier: BSD-3-Clause
"""The host's part in results of benchmarks/run.py: of a step on a CPU, and beside a GPU."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from suites.packages import rest_between
from torchfuse.testing.bench import HostShare, interleave, summarize


def host_parts(case: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds of the steps on as many tensors of one element, where a suite has them."""
    if not hasattr(case, "prepare_host"):
        return {}
    device = torch.device(arguments.device)
    steps = case.prepare_host(device)
    samples = interleave(steps, rounds=3 * arguments.rounds, setup=rest_between(steps, device))
    return {name: statistics.median(values) for name, values in samples.items()}


def host_row(host: HostShare, case: Any) -> dict[str, Any] | None:
    """How long the host takes to enqueue a call, where a GPU was timed."""
    if not host.seconds:
        return None
    summary = summarize(host.seconds, case.subject)
    return {
        "seconds": {name: entry["seconds"] for name, entry in summary.items()},
        "ratios": {peer: summary[peer]["ratio"]["median"] for peer in case.peers},
        "waits": sorted(host.waits),
    }
