# SPDX-License-Identifier: BSD-3-Clause
"""The CPU's targets show the first file as before, and the range of the later ones as after."""

from __future__ import annotations

from typing import Any

import pytest

import targets

TARGET = targets.Target("Adam", "step/large", "torch fused", 1.5)


def result(ratio: float, gb_per_s: float, case: str = TARGET.case) -> dict[str, Any]:
    """A result file of one case, whose stream runs at 50 GB/s."""
    entry = {
        "name": case,
        "subject": "torchfuse",
        "gb_per_s": {"torchfuse": gb_per_s, "in-place scale": 50.0},
        "ratios": {TARGET.peer: {"of_medians": 7.0, "per_round": {"median": ratio}}},
    }
    environment = {"cpu": "AMD EPYC", "cpu_isa": "avx512", "threads": 2, "torch": "2.11.0"}
    return {"suite": TARGET.suite, "environment": environment, "cases": [entry]}


@pytest.fixture(autouse=True)
def one_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "TARGETS", (TARGET,))


def cells(*results: dict[str, Any]) -> list[str]:
    row = targets.cpu_targets(results).splitlines()[-1]
    return [cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in row.strip("|").split("|")]


def test_the_first_file_is_before_and_the_last_one_after() -> None:
    found = cells(result(1.2, 30.0), result(1.625, 45.0))
    assert found == [
        "Adam",
        "`step/large`",
        "torch fused",
        "≥ 1.5",
        "1.20",
        "1.62",
        "45.0",
        "90 %",
        "met",
    ]


def test_one_file_has_no_before_and_a_miss_is_called_one() -> None:
    assert cells(result(1.49, 25.0))[4:] == ["", "1.49", "25.0", "50 %", "missed"]


@pytest.mark.parametrize(
    ("after", "verdict"), [((1.5, 1.75), "met"), ((1.4, 1.75), "met in 1 of 2")]
)
def test_later_files_give_a_range(after: tuple[float, float], verdict: str) -> None:
    found = cells(result(1.2, 30.0), result(after[0], 45.0), result(after[1], 40.0))
    ratios = " to ".join(f"{ratio:.2f}" for ratio in after)
    assert found[4:] == ["1.20", ratios, "40.0 to 45.0", "80 to 90 %", verdict]


def test_a_later_file_without_the_case_is_counted() -> None:
    other = result(9.9, 9.9, "step/other")
    found = cells(result(1.2, 30.0), other, result(1.625, 45.0))
    assert found[4:] == ["1.20", "1.62", "45.0", "90 %", "met, not measured in 1 of 2"]
    found = cells(result(1.2, 30.0), result(1.4, 45.0), other, result(1.75, 45.0))
    assert found[-1] == "met in 1 of 2, not measured in 1 of 3"


def test_a_later_file_does_not_take_the_place_of_the_first() -> None:
    other = result(9.9, 9.9, "step/other")
    found = cells(other, result(1.4, 45.0), result(1.75, 40.0))
    assert found[4:] == ["", "1.40 to 1.75", "40.0 to 45.0", "80 to 90 %", "met in 1 of 2"]
    with pytest.raises(
        ValueError, match="expected a later result file of fused_adam with step/lar"
    ):
        targets.cpu_targets([result(1.2, 30.0), other])


def test_every_later_file_is_of_the_same_cores() -> None:
    before, other, after = result(1.0, 20.0), result(1.2, 30.0), result(1.2, 30.0)
    for one, gain in ((before, 1.8), (other, 0.7), (after, 1.9)):
        one["cases"][0]["thread_gain"] = [gain]
    with pytest.raises(ValueError, match=r"got 1\.80 and 0\.70 times the work of one"):
        targets.cpu_targets([before, other, after])


def test_later_files_are_compared_where_the_first_says_nothing() -> None:
    before, one, other = result(1.0, 20.0), result(1.2, 30.0), result(1.2, 30.0)
    one["cases"][0]["thread_gain"], other["cases"][0]["thread_gain"] = [0.7], [1.9]
    with pytest.raises(ValueError, match=r"got 0\.70 and 1\.90 times the work of one"):
        targets.cpu_targets([before, one, other])


def test_later_files_wait_alike() -> None:
    before, one, other = result(1.0, 20.0), result(1.2, 30.0), result(1.2, 30.0)
    one["environment"]["openmp_wait_policy"] = "default"
    assert cells(before, one, other)[-1] == "missed"
    other["environment"]["openmp_wait_policy"] = "passive"
    with pytest.raises(ValueError, match="same openmp_wait_policy, got default and passive"):
        targets.cpu_targets([before, one, other])


def test_another_reference_stream_is_used_where_the_case_names_one() -> None:
    measured = result(2.0, 30.0)
    measured["cases"][0]["reference"] = "copy"
    measured["cases"][0]["gb_per_s"]["copy"] = 40.0
    assert cells(measured)[7] == "75 %"


def test_a_target_that_no_file_measured_is_named() -> None:
    message = "expected a result file of fused_adam with step/large and torch fused"
    with pytest.raises(ValueError, match=message):
        targets.cpu_targets([result(1.0, 1.0, "step/other")])


def test_a_case_of_another_suite_is_another_case() -> None:
    other = result(9.9, 9.9)
    other["suite"] = "optimizers"
    assert cells(other, result(1.75, 45.0))[4:6] == ["", "1.75"]


def test_a_target_of_many_cases_says_how_many_reach_it() -> None:
    measured = result(1.75, 30.0, f"{TARGET.case}/nchw")
    measured["cases"] += result(1.25, 20.0, f"{TARGET.case}/channels_last")["cases"]
    measured["cases"] += result(0.5, 10.0, f"{TARGET.case}r")["cases"]
    found = cells(measured)
    assert found[5:] == ["1.25 to 1.75", "20.0 to 30.0", "40 to 60 %", "met in 1 of 2"]


@pytest.mark.parametrize(("gb_per_s", "verdict"), [(45.0, "met"), (44.9, "missed")])
def test_a_target_without_a_peer_is_one_of_the_stream(
    monkeypatch: pytest.MonkeyPatch, gb_per_s: float, verdict: str
) -> None:
    monkeypatch.setattr(targets, "TARGETS", (TARGET._replace(peer=None, wanted=90),))
    found = cells(result(9.9, gb_per_s))
    assert found[2:6] == ["the stream", "≥ 90 %", "", ""]
    assert found[8] == verdict


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu": "Intel Xeon"}, "the same cpu, got AMD EPYC and Intel Xeon."),
        ({"cpu_isa": "avx2"}, "the same cpu_isa, got avx512 and avx2."),
        ({"threads": 1}, "the same threads, got 2 and 1."),
        ({"torch": "2.12.0"}, "the same torch, got 2.11.0 and 2.12.0."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_files_of_two_machines_are_no_before_and_after(
    change: dict[str, Any], message: str
) -> None:
    other = result(1.2, 30.0)
    other["environment"] |= change
    with pytest.raises(ValueError, match=message):
        targets.cpu_targets([result(1.0, 20.0), other])


def test_files_of_other_cores_are_no_before_and_after() -> None:
    """Two threads of one core, and of two."""
    before, after = result(1.0, 20.0), result(1.2, 30.0)
    before["cases"][0]["thread_gain"], after["cases"][0]["thread_gain"] = [0.7, 0.8], [1.8, 1.9]
    with pytest.raises(ValueError, match=r"got 0\.75 and 1\.85 times the work of one"):
        targets.cpu_targets([before, after])
