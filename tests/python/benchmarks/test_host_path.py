# SPDX-License-Identifier: BSD-3-Clause
"""The gate on a step's instructions, without valgrind: what it reads, and what it lets pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import callgrind
import host_path
import host_path_baseline as baseline
from torchfuse.testing import OPTIM_SPECS

#: What callgrind writes for a step that calls malloc 3 times, C++'s new twice, and realloc once,
#: which calls malloc. The number after "calls=" has calls from outside of the counted part too.
DUMP = """\
# callgrind format
cmd:  python benchmarks/host_path.py
positions: instr line
events: Ir
summary: 1056


ob=/lib/libtorchfuse.so
fl=???
fn=step(bool)
0x1000 0 10
0x1004 0 900
cob=/lib/libc.so.6
cfn=malloc'step(bool)'main
calls=1007 0x98930 3281
0x1008 0 40
0x1008 0 3
fi=some_header.h
0x1010 12 20

fn=step(bool)'2
0x1000 0 5

ob=/lib/libc.so.6
fl=???
fn=malloc'step(bool)'main
0x98930 3281 3
0x98932 3281 9

fn=malloc'operator new(unsigned long)'operator new[](unsigned long)'make()
0x98930 3281 2
0x98932 3281 98

fn=realloc'grow()'main
0x99000 5 1

fn=malloc'realloc'grow()
0x98930 3281 1
0x98932 3281 4

totals: 1056
"""

ROW = {"instructions_per_step": 1000.0, "allocations_per_step": 4.0}


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A baseline of two rows for this torch, Python and compiler."""
    path = tmp_path / "baselines" / "host_path.json"
    monkeypatch.setattr(baseline, "FILE", path)
    baseline.write({"FusedAdam/400": ROW, "FusedSGD/400": ROW}, keep=False)
    return path


def changed(**counts: float) -> dict[str, baseline.Counts]:
    return {"FusedAdam/400": {**ROW, **counts}, "FusedSGD/400": ROW}


def test_a_dump_is_read() -> None:
    profile = callgrind.Profile.read(DUMP)
    assert profile.instructions() == 1056
    assert profile.functions() == {
        ("step(bool)", "libtorchfuse.so"): 938,
        ("malloc", "libc.so.6"): 117,
        ("realloc", "libc.so.6"): 1,
    }
    # What realloc does within itself is no allocation of its own.
    assert profile.allocations() == {"step(bool)": 3, "make()": 2, "grow()": 1}
    with pytest.raises(RuntimeError, match="expected counts of instructions in the dump, got none"):
        callgrind.Profile.read("events: Ir\n\ntotals: 0\n")


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize("share", [0.979, 1.02])
def test_two_percent_more_pass_and_less_is_told(
    share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baseline.check(changed(instructions_per_step=1000 * share)) == 0
    *hints, closing = capsys.readouterr().out.splitlines()
    assert len(hints) == int(share < 0.98)
    assert all("FusedAdam/400: became cheaper: 1,000.0 instructions" in hint for hint in hints)
    assert closing == "host_path: 2 of 2 rows passed"


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (
            {"instructions_per_step": 1021.0},
            "1,000.0 instructions per step in the baseline, 1,021.0 now",
        ),
        ({"allocations_per_step": 5.0}, "4.0 allocations per step in the baseline, 5.0 now"),
    ],
)
def test_a_dearer_row_fails_by_name(
    counts: dict[str, float], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baseline.check(changed(**counts)) == 1
    failure, closing = capsys.readouterr().out.splitlines()
    assert failure.startswith("host_path: FusedAdam/400: expected at most 2% above the baseline")
    assert told in failure
    assert "run `python benchmarks/host_path.py --write-baseline`" in failure
    assert closing == "host_path: 1 of 2 rows passed"


@pytest.mark.usefixtures("committed")
def test_a_row_without_baseline_fails_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert baseline.check({**changed(), "FusedNew/400": ROW}) == 1
    failure, closing = capsys.readouterr().out.splitlines()
    assert failure.startswith("host_path: FusedNew/400: expected a row in the baseline, got none.")
    assert closing == "host_path: 2 of 3 rows passed"


def test_without_a_baseline_nothing_is_compared(
    committed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(baseline, "key", lambda: "torch 9")
    assert baseline.check(changed(instructions_per_step=1e9)) == 0
    said = capsys.readouterr().out
    assert said == "host_path: no baseline for torch 9; nothing was compared\n"
    # Writing one leaves those of others.
    baseline.write(changed(), keep=False)
    assert len(json.loads(committed.read_text())) == 2


def test_every_optimizer_is_counted_and_the_committed_baselines_are_whole() -> None:
    ours = {row.name for row in host_path.selected()}
    assert {f"{spec.optimizer.__name__}/400" for spec in OPTIM_SPECS} < ours
    assert {f"FusedAdam/{tensors}" for tensors in (100, 400, 1000, 10_000)} < ours
    assert {name.partition("/")[0] for name in ours} >= {
        "FusedAdam with clipping",
        "FusedAdam on DTensors",
        "GradScaler step and update",
    }
    assert baseline.read()
    for key, rows in baseline.read().items():
        assert set(rows) == ours, key


@pytest.mark.parametrize("processors", [None, 1, 2, 3, 64])
def test_programs_that_count_at_once_return_the_rows_in_their_order(
    processors: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = host_path.selected()
    names = [row.name for row in rows]
    counted: list[list[str]] = []

    def count_alone(part: list[host_path.Row]) -> list[str]:
        counted.append([row.name for row in part])
        return counted[-1]

    monkeypatch.setattr(host_path, "count_alone", count_alone)
    monkeypatch.setattr(host_path.os, "cpu_count", lambda: processors)
    assert host_path.count(rows) == names
    assert len(counted) == min(processors or 1, len(names))
    assert max(map(len, counted)) - min(map(len, counted)) <= 1
