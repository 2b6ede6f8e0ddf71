# SPDX-License-Identifier: BSD-3-Clause
"""Every suite runs on tiny sets; its figures are those of its rounds."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import run
from suites import dtensor, fused_adam, layers
from suites.gpu import UnscaleCase
from suites.muon import MuonCase
from suites.parameters import ParameterSet
from suites.steps import FUSED, OURS, StepCase

TINY = ParameterSet("tiny", ((33,), (4, 5), (1,)))
TINY_MATRICES = ParameterSet("tiny", ((4, 5), (3, 2, 2), (4, 5)))
ARGUMENTS = run.parse_arguments(["--rounds", "2", "--threads", "1"])


@pytest.fixture(autouse=True)
def _one_thread_and_no_group() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    if dist.is_initialized():  # by the suite of DTensors
        dist.destroy_process_group()
        dtensor._mesh.cache_clear()


def cases() -> dict[str, Any]:
    """One case of each kind, on tiny sets."""
    found: dict[str, Any] = {}
    suites = [importlib.import_module(f"suites.{name}") for name in run.SUITES if name != "peers"]
    for suite in suites:
        for case in suite.CASES:
            kind = f"{suite.__name__.removeprefix('suites.')}/{case.name.rpartition('/')[0]}"
            if isinstance(case, StepCase):
                tiny = TINY_MATRICES if isinstance(case, MuonCase) else TINY
                small = dataclasses.replace(tiny, moments=case.parameters.moments)
                found[kind] = dataclasses.replace(case, parameters=small)
            elif isinstance(case, fused_adam.NormCase | UnscaleCase):
                found[kind] = dataclasses.replace(case, parameters=TINY)
            elif isinstance(case, layers.LayerCase):
                shape = (4, 8, 3, 3) if len(case.shape) == 4 else (6, 40)
                found[kind] = dataclasses.replace(case, shape=shape)
    return found


CASES = cases()


assert len(CASES) > 60


@pytest.mark.parametrize("name", CASES)
def test_a_case_runs_on_tiny_tensors(name: str) -> None:
    case = CASES[name]
    row = run.run_case(case, ARGUMENTS)
    assert row["bytes"] == int(case.bytes_per_element * row["numel"])
    assert set(row["ratios"]) == set(row["seconds"]) - {case.subject} == set(case.peers)
    for entry in (*row["seconds"].values(), *row["ratios"].values()):
        assert 0 < entry["q1"] <= entry["median"] <= entry["q3"]
    assert set(row["streams"]) == {"in-place scale", "copy", "read"}
    if isinstance(case, MuonCase):
        assert all(0 < groups < 10 for groups in row["extra_memory"].values())


def test_figures_of_a_case_are_those_of_rounds() -> None:
    case = SimpleNamespace(
        name="a", subject=OURS, peers=(FUSED,), parameters=TINY, bytes_per_element=28
    )
    samples = {OURS: [1.0, 2.0, 4.0], FUSED: [4.0, 2.0, 8.0]}
    samples |= {run.IN_PLACE: [2.0] * 3, run.COPY: [4.0] * 3, run.READ: [1.0] * 3}
    row = run.summary_of(case, samples, 8 * 10**9)
    assert row["seconds"][OURS] == {"q1": 1.5, "median": 2.0, "q3": 3.0}
    # The median of 4, 1 and 2; not 4 / 2, the ratio of the medians.
    assert row["ratios"] == {FUSED: {"q1": 1.5, "median": 2.0, "q3": 3.0}}
    samples[FUSED] = [1.0, 6.0, 4.0]
    assert run.summary_of(case, samples, 1)["ratios"][FUSED]["median"] == 1.0
    assert row["streams"] == {run.IN_PLACE: 4.0, run.COPY: 2.0, run.READ: 8.0}
    assert (row["tensors"], row["numel"], row["bytes"]) == (3, 54, 54 * 28)
