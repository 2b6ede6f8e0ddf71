# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios: every contender computes the same, and what does not is refused."""

from __future__ import annotations

import argparse
import dataclasses
import functools

import pytest
import torch

import compare
import run
from suites import compiled_step, scenarios, structures
from suites.compiled_step import Compiled
from suites.contenders import FUSED, OURS
from suites.pipelines import SCENARIOS, Memory, Ours, Pipeline
from suites.scenarios import Case, Peer

CPU = torch.device("cpu")
SMALL = "tiny_400"


def small_cases() -> list[Case]:
    """Each scenario and precision once, on small tensors."""
    found = {}
    for case in scenarios.CASES:
        found[case.masters, case.scenario] = dataclasses.replace(
            case,
            parameters=SMALL,
            contenders=tuple(peer for peer in case.contenders if peer.make is not Compiled),
        )
    return list(found.values())


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_all_contenders_compute_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "BLOCK", 1000)  # tensors are joined, and some of them cut
    prepared = case.prepare(CPU, 0)
    assert set(prepared.functions) == {peer.name for peer in case.contenders}
    assert prepared.verified["params"] < 1e-6
    assert prepared.pass_bytes[OURS] == case.bytes_per_element
    for step in prepared.functions.values():
        step()


class Forgetful(structures.Structure):
    """Overlooks what the check found."""

    def step(self) -> None:
        """A step with another gradient in place of the infinite one."""
        for grad in self.memory.grads:
            grad.nan_to_num_(posinf=0.0)
        super().step()


def with_peer(scenario: str, make: object, masters: bool = False) -> Case:
    """A case of ours and one more."""
    (case,) = [
        case for case in small_cases() if case.scenario.name == scenario and case.masters == masters
    ]
    peer = Peer("other", make, {scenario: 1.0})  # type: ignore[arg-type]
    return dataclasses.replace(case, contenders=(case.contenders[0], peer))


class Unclipped(Ours):
    """Clips at twice the limit."""

    def __init__(self, memory: Memory, scenario: object, scale: float) -> None:
        wrong = dataclasses.replace(memory, max_norm=2 * memory.max_norm)
        super().__init__(wrong, scenario, scale)  # type: ignore[arg-type]


def test_what_computes_something_else_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match=r"fp32/s2/tiny_400: expected params of other within"):
        with_peer("s2", Unclipped).prepare(CPU, 0)
    with pytest.raises(RuntimeError, match=r"expected other to skip a step with an infinite grad"):
        with_peer("s1", Forgetful).prepare(CPU, 0)


def test_masters_that_are_not_carried_back_are_noticed() -> None:
    class Lost(structures.Structure):
        def step(self) -> None:
            super().step()
            self.memory.params[0].zero_()

    with pytest.raises(RuntimeError, match="expected the parameters of other to be its masters"):
        with_peer("s0", Lost, masters=True).prepare(CPU, 0)


def test_contenders_work_in_one_memory() -> None:
    case = small_cases()[0]
    made: list[Pipeline] = []

    def keep(make: scenarios.Make, *arguments: object) -> Pipeline:
        made.append(make(*arguments))  # type: ignore[arg-type]
        return made[-1]

    peers = [
        dataclasses.replace(peer, make=functools.partial(keep, peer.make))
        for peer in case.contenders
    ]
    dataclasses.replace(case, contenders=tuple(peers)).prepare(CPU, 0)
    memory = made[0].memory
    for pipeline in made:
        before = memory.params[0].clone(), memory.means[0].clone()
        memory.grads[0].fill_(3.0)
        pipeline.step()
        assert not torch.equal(memory.params[0], before[0])
        assert not torch.equal(memory.means[0], before[1])


def test_what_one_contender_writes_is_no_change_by_the_user_of_another() -> None:
    memory = Memory.of(scenarios.load(SMALL), True, CPU)
    (ours, *_), (theirs, *_) = memory.parameters(), memory.parameters()
    before = ours._version
    theirs.detach().fill_(1.0)
    memory.params[0].fill_(2.0)
    assert (ours._version, float(ours[0])) == (before, 2.0)


def test_a_row_says_bytes_share_host_and_dispatches() -> None:
    case = small_cases()[3]
    assert (case.scenario, case.masters) == (SCENARIOS[3], False)
    arguments = argparse.Namespace(device="cpu", seed=0, threads=1, rounds=2)
    found = run.run_case(case, arguments)
    assert found["ceilings"] == ["in-place scale", "copy"]
    assert found["pass_bytes"][FUSED] == 48
    assert set(found["host_part_seconds"]) == {OURS, *case.peers}
    assert found["dispatched"][OURS] < 20 < 400 < found["dispatched"][FUSED]
    environment = dict.fromkeys(("gpu", "cpu", "threads", "cpu_isa", "torch", "date"))
    result = {"suite": "scenarios", "environment": environment, "cases": [found]}
    table = compare.table({**result, "peak_memory": [], "host_path": None})
    (line,) = [line for line in table.splitlines() if f"| {FUSED} | 32 | 48 |" in line]
    rate = found["gb_per_s"]
    ceiling = max(rate["in-place scale"], rate["copy"])
    assert f"| {rate[FUSED] / ceiling:.0%} |" in line
    assert line.endswith(f"| {found['dispatched'][FUSED]:,} |")


def test_the_compiled_step_computes_the_same() -> None:
    """As written, without the compiler."""

    class Eager(Compiled):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self._function = compiled_step.adam

    for masters in (False, True):
        for scenario in ("s0", "s2", "s3"):
            with_peer(scenario, Eager, masters).prepare(CPU, 0)
