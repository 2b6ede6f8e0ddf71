# SPDX-License-Identifier: BSD-3-Clause
"""A result says what its threads were worth, and runs on other cores are not compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import comparable
import compare
import thread_gain


def result(*gains: float) -> dict[str, Any]:
    environment = {
        "cpu": "AMD EPYC",
        "gpu": None,
        "cpu_isa": "avx512",
        "threads": 2,
        "torch": "2.11.0",
        "date": "2026-11-26T16:17:24+00:00",
        "git": {"dirty": False},
    }
    cases = [{"name": "step", "thread_gain": list(gains)}] if gains else [{"name": "step"}]
    return {"suite": "scenarios", "environment": environment, "cases": cases}


def test_the_number_of_threads_is_kept() -> None:
    before = torch.get_num_threads()
    gain = thread_gain.measure(2)
    assert gain is not None
    assert gain > 0
    assert torch.get_num_threads() == before


def test_one_thread_is_compared_with_nothing() -> None:
    assert thread_gain.measure(1) is None


def test_the_faster_threads_have_the_larger_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {1: 100.0, 2: 190.0}
    monkeypatch.setattr(thread_gain, "_elements_per_second", speeds.__getitem__)
    assert thread_gain.measure(2) == pytest.approx(1.9)


def test_a_run_on_one_core_is_not_compared_with_one_on_two() -> None:
    one, two = result(0.9, 1.0), result(1.8, 1.9)
    assert comparable.refusals(one, two) == [
        "Expected two runs whose threads do alike in caches, got 0.95 and 1.85 times the work of "
        "one: they had other cores, or slept while they waited."
    ]
    assert comparable.refusals(two, result(1.6, 1.7)) == []
    assert comparable.refusals(two, result()) == []


def test_the_printed_table_says_it() -> None:
    printed = {**result(0.9, 1.0, 0.92), "peak_memory": [], "host_path": None}
    printed["cases"][0] |= {"gb_per_s": {"in-place scale": 40.0}, "ratios": {}}
    assert "\n\nIn caches 2 threads did 0.90 to 1.00 times" in compare.table(printed)
    assert "In caches" not in compare.table({**printed, "cases": []})
    sentence = thread_gain.sentence(result(0.9, 1.0, 0.92))
    assert sentence == "In caches 2 threads did 0.90 to 1.00 times the work of one (median 0.92)."


def test_the_page_has_a_row_for_each_result_that_says_it() -> None:
    lines = thread_gain.table([result(), result(1.8, 1.9)]).splitlines()
    assert len(lines) == 3
    assert lines[2].split("|")[1:5] == [
        " scenarios ",
        " 2026-11-26 16:17 ",
        " 1.85 ",
        " 1.80\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}1.90 ",
    ]
