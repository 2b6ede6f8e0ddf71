# SPDX-License-Identifier: BSD-3-Clause
"""Traffic of a step: what a dump of a simulated cache says, and a small step under valgrind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import callgrind
import torchfuse
import traffic

EVENTS = "Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw DLdmr DLdmw"


def dump(numbers: str, events: str = EVENTS) -> str:
    return f"# callgrind format\nevents: {events}\nsummary: {numbers}\n\nfn=(1) step\n0 5\n"


def test_misses_and_driven_out_lines_are_bytes() -> None:
    counted = traffic.Traffic.of(dump("900 90 80 7 6 5 4 30 20 9 8"))
    assert counted == (64 * 50, 64 * 17)
    assert traffic.Traffic.of(dump("900 90 80 7 6 5 4 30")) == (64 * 30, 0)
    with pytest.raises(RuntimeError, match=r"expected counts of a cache in the dump, got \['Ir'\]"):
        traffic.Traffic.of(dump("900", "Ir"))


def test_scenarios_are_named_and_their_contenders_counted() -> None:
    chosen = traffic.selected("fp32/s3")
    assert [peer.name for _, peer in chosen] == list(traffic.COUNTED)
    names = {traffic.name_of(case) for case, _ in traffic.selected("")}
    assert len(names) == 8


def test_an_unknown_scenario_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callgrind, "valgrind", lambda: "valgrind")
    assert traffic.main(["--only", "s9"]) == 2
    assert "expected --only to name one of fp32/s0 " in capsys.readouterr().out
    monkeypatch.setattr(callgrind, "valgrind", lambda: None)
    assert traffic.main([]) == 2
    assert "expected valgrind on the PATH, got none. Install it." in capsys.readouterr().err


def test_a_set_without_elements_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        traffic.parse_arguments(["--numel", "0"])
    assert "expected --numel to be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_reads_and_writes_what_the_model_says(tmp_path: Path) -> None:
    if callgrind.valgrind() is None:
        pytest.skip("needs valgrind: install it, with apt-get install valgrind")
    if torchfuse._C.cpu_isa() not in ("avx2", "avx512"):
        pytest.skip("needs a processor with AVX2")
    out = tmp_path / "traffic.json"
    options = ["--only", "fp32/s0", "--numel", str(2**19), "--cache", str(2**20)]
    assert traffic.main([*options, "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    counted = case["traffic"]["torchfuse"]
    assert counted["read"] == pytest.approx(16, rel=0.15)
    assert counted["written"] == pytest.approx(12, rel=0.15)
