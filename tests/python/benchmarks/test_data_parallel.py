# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of data parallelism: that both languages do the same, and what it refuses.

The C++ side is benchmarks/cpp/bench_data_parallel.cpp; `make programs` builds it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpp_programs import BUILD

import data_parallel

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
FIGURES = {"torch": "2.11.0", "bucket_bytes": [4, 8], "losses": [2.0, 1.0], "seconds": [0.1, 0.1]}
#: Of a run in seconds, which takes about half a minute.
TIME_LIMIT = 300


@pytest.fixture(scope="module")
def program() -> Path:
    path = data_parallel.program_of(BUILD)
    if not path.exists():
        pytest.skip(f"{path.name} is not built in {BUILD}; make programs builds it")
    return path


@pytest.mark.usefixtures("program")
def test_a_quick_run_of_all_contenders(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = str(ROOT / "benchmarks/data_parallel.py")
    done = subprocess.run(
        [sys.executable, script, "--quick", "--build", str(BUILD), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["processes"] == 2
    mlp, cnn = result["models"]
    # All contenders had these buckets: every parameter once, 4 bytes each.
    assert sum(mlp["bucket_bytes"]) == 4 * (1025 * 1536 + 4 * 1537 * 1536 + 1537 * 10)
    assert len(mlp["bucket_bytes"]) > 1
    convolutions = sum(9 * c * d + 2 * d for c, d in ((3, 32), (32, 64), (64, 128)))
    assert cnn["bucket_bytes"] == [4 * (convolutions + 129 * 10)]
    for row in (mlp, cnn):
        assert set(row["steps"]) == {data_parallel.SUBJECT, *data_parallel.PEERS}
        assert all(len(steps) == 3 for rounds in row["steps"].values() for steps in rounds)
        # Steps that change nothing would agree whatever was averaged.
        assert row["losses"][-1] < 0.999 * row["losses"][0]
        assert all(difference <= 1e-5 for difference in row["loss_differences"].values())
        assert f"| {row['name']} |" in done.stdout


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"losses": [2.0, 1.00002]},
            "expected losses of peer within 1e-05 of .* got .* 2e-05 in step 1",
        ),
        ({"losses": [math.nan, 1.0]}, "expected losses of peer within 1e-05 .* nan in step 0"),
        ({"losses": [2.0, math.nan]}, "expected losses of peer within 1e-05 .* nan in step 1"),
        ({"bucket_bytes": [12]}, r"expected bucket_bytes of peer .* \[4, 8\], got \[12\]"),
        ({"torch": "2.15.0"}, r"expected torch of peer .* 2\.11\.0, got 2\.15\.0"),
    ],
)
def test_contenders_that_differ_are_not_timed(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        data_parallel.verify("peer", {**FIGURES, **changed}, FIGURES)


def test_losses_that_agree() -> None:
    other = {**FIGURES, "losses": [2.0, 1.000004]}
    assert data_parallel.verify("peer", other, FIGURES) == pytest.approx(4e-6)


def test_a_build_without_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        data_parallel.parse_arguments(["--build", str(tmp_path)])
    assert "build the target torchfuse_bench_data_parallel" in capsys.readouterr().err


def test_a_group_has_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        data_parallel.parse_arguments(["--processes", "0"])
    assert "expected --processes to be at least 1" in capsys.readouterr().err


def test_the_verdict() -> None:
    def row(ratio: float, target: float | None) -> dict[str, Any]:
        return {
            "target": target,
            "ratios": {"peer": {"of_medians": 1.0, "per_round": {"median": ratio}}},
        }

    assert not data_parallel.missed([row(1.05, 1.05), row(9.0, None)])
    assert data_parallel.missed([row(1.0, 1.05), row(1.06, 1.05)])
    assert data_parallel.missed([row(math.nan, 1.05)])
