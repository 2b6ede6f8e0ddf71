# SPDX-License-Identifier: BSD-3-Clause
"""The gate on a step's instructions, without valgrind: what it reads, and what it lets pass."""

from __future__ import annotations

from pathlib import Path

import pytest

import callgrind
import host_path_baseline as baseline

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
