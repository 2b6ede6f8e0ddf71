# SPDX-License-Identifier: BSD-3-Clause
"""Process groups and data parallelism of C++, in real processes, against torch in Python.

The C++ program is tests/cpp/api/parallel/data_parallel_program.cpp.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import data_parallel as reference
from support.cpp_programs import cpp_program
from support.processes import need_devices
from support.torchrun import Outcome, by_hand, torchrun
from torch import Tensor
from torch.utils.data import DistributedSampler

pytestmark = pytest.mark.processes

Report = dict[str, list[str]]
#: Starts a program in so many processes.
Launch = Callable[[int, list[str]], Outcome]


def report_of(folder: Path, rank: int) -> Report:
    report: Report = {}
    for line in (folder / f"rank{rank}.txt").read_text().splitlines():
        name, *values = line.split(" ")
        report.setdefault(name, []).extend(values)
    return report


def run(
    mode: str, folder: Path, ranks: int = 2, device: str = "cpu", launch: Launch = torchrun
) -> list[Report]:
    need_devices(device, ranks)
    on_device = [] if device == "cpu" else [device]
    outcome = launch(ranks, cpp_program("data_parallel", mode, folder, *on_device))
    assert outcome.status == 0, outcome.output
    assert "Warning" not in outcome.output
    return [report_of(folder, rank) for rank in range(ranks)]


def numbers(report: Report, name: str) -> Tensor:
    return torch.tensor([float(value) for value in report[name]])


def assert_state(report: Report, state: dict[str, Tensor], rtol: float = 1e-5) -> None:
    for name, expected in state.items():
        torch.testing.assert_close(
            numbers(report, name), expected.reshape(-1), rtol=rtol, atol=1e-6, msg=name
        )


def test_training_equals_one_process_on_the_pooled_batch(tmp_path: Path, device: str) -> None:
    reports = run("train", tmp_path, 3, device)
    for report in reports:
        assert_state(report, reference.pooled(3))
        parameters = {name: values for name, values in report.items() if name != "loss"}
        assert parameters == {name: reports[0][name] for name in parameters}


@pytest.fixture(scope="module")
def torch_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[reference.Trained]]:
    """What torch's class computes in each mode."""
    return reference.torch_ddp(tmp_path_factory.mktemp("torch_ddp"), 2)


@pytest.mark.parametrize("mode", reference.MODES)
def test_training_equals_torch_ddp(
    tmp_path: Path, mode: str, torch_ddp: dict[str, list[reference.Trained]], device: str
) -> None:
    expected = torch_ddp[mode]
    for rank, report in enumerate(run(mode, tmp_path, len(expected), device, by_hand)):
        losses, state = expected[rank]
        torch.testing.assert_close(
            numbers(report, "loss"), torch.tensor(losses), rtol=1e-5, atol=1e-7
        )
        if mode in ("norm", "twice"):  # statistics of rank 0, as sync_buffers() leaves them
            state = expected[0][1]
        assert_state(report, state)


def test_what_no_rank_uses_gets_no_gradient(tmp_path: Path) -> None:
    for report in run("unused", tmp_path):
        assert report["never.grad"] == ["undefined"]


def test_accumulation_with_a_loss_scaler_and_a_fused_optimizer(tmp_path: Path, device: str) -> None:
    for report in run("accumulate", tmp_path, device=device):
        assert report["skipped"] == ["1"]
        assert_state(report, reference.accumulated(2), rtol=1e-4)


def test_sub_groups(tmp_path: Path, device: str) -> None:
    first, second, third = run("groups", tmp_path, 3, device)
    assert first["member"] == ["torchfuse/0", "0"]
    assert second["member"] == ["no"]
    assert third["member"] == ["torchfuse/0", "1"]
    assert first["sum"] == third["sum"] == ["4", "4"]


def test_indices_of_the_sampler_are_those_of_torch(tmp_path: Path) -> None:
    found = subprocess.run(
        cpp_program("data_parallel", "sampler", tmp_path),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = found.stdout.splitlines()
    assert len(lines) == 5 * 4 * 2 * 2 * 3
    for line in lines:
        size, replicas, drop_last, shuffle, epoch, *indices = (int(word) for word in line.split())
        sampler = DistributedSampler(
            range(size),  # type: ignore[arg-type]
            num_replicas=replicas,
            rank=replicas - 1,
            shuffle=bool(shuffle),
            seed=42,
            drop_last=bool(drop_last),
        )
        sampler.set_epoch(epoch)
        assert indices == list(sampler), line


@pytest.mark.parametrize("mode", ["killed", "stopped"])
def test_a_lost_rank_is_an_error_in_the_others(tmp_path: Path, mode: str) -> None:
    # Not under torchrun, which ends the other processes as soon as one has ended.
    outcome = by_hand(2, cpp_program("data_parallel", mode, tmp_path), leaves=mode == "stopped")
    assert re.search(
        r"error: torchfuse::parallel::DistributedDataParallel: expected all 2 ranks of group "
        r"'torchfuse' in the reduction of gradients 1 of 1 \('last.*12 in all\) within the "
        r"group's timeout, got in rank 0: .+\. There is no sign of rank 1 of the group",
        outcome.output,
    ), outcome.output


def test_sub_groups_that_differ(tmp_path: Path) -> None:
    outcome = torchrun(3, cpp_program("data_parallel", "different_groups", tmp_path))
    assert outcome.status != 0
    sentence = "expected all processes of group 'torchfuse/0' to pass the same arguments"
    assert sentence in outcome.output
