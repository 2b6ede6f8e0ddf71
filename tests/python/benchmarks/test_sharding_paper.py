# SPDX-License-Identifier: BSD-3-Clause
"""Memory, bytes and messages of split training, against sums that are written out here."""

from __future__ import annotations

import pytest

import scale_paper
import sharding_paper
from sharding_paper import FORMS

NUMEL = 1_557_611_200  # of GPT-2 XL


@pytest.mark.parametrize(
    ("name", "bytes_of_element"),
    [
        ("data parallelism", 2 + 2 + 12),
        ("ZeRO stage 1", 2 + 2 + 12 / 8),
        ("ZeRO stage 2", 2 + 2 / 8 + 12 / 8),
        ("FSDP2", 16 / 8),
    ],
)
def test_what_stays_in_memory(name: str, bytes_of_element: float) -> None:
    assert sharding_paper.memory(FORMS[name], 8) == pytest.approx(bytes_of_element * NUMEL)


@pytest.mark.parametrize(
    ("name", "bytes_of_element"),
    [("data parallelism", 4), ("ZeRO stage 1", 6), ("ZeRO stage 2", 4), ("FSDP2", 6)],
)
def test_what_each_sends(name: str, bytes_of_element: int) -> None:
    expected = bytes_of_element * NUMEL * 63 / 64
    assert sharding_paper.bytes_sent(FORMS[name], 64) == pytest.approx(expected)


def test_messages_pass_bytes_at_the_limit() -> None:
    for form in FORMS.values():
        ranks = round(sharding_paper.limit(form)) + 1
        sent = sharding_paper.bytes_sent(form, ranks) / scale_paper.NETWORK
        assert sharding_paper.message_time(form, ranks) == pytest.approx(sent, rel=0.02)


def test_a_bucket_decides_the_limit_of_stage_2() -> None:
    # 26,214,400 bytes at 50 GB/s take as long as 105 messages of 5 µs.
    assert sharding_paper.limit(FORMS["ZeRO stage 2"]) == pytest.approx(105, rel=0.01)


def test_the_update_is_of_its_part() -> None:
    whole = sharding_paper.update_time(FORMS["data parallelism"], 64)
    assert whole == pytest.approx(28 * NUMEL / 4.8e12)
    assert sharding_paper.update_time(FORMS["FSDP2"], 64) == pytest.approx(whole / 64)


def test_tables_have_every_form_and_number_of_gpus() -> None:
    text = sharding_paper.times()
    for name in FORMS:
        assert text.count(f"| {name} |") == len(sharding_paper.RANKS)
    assert sharding_paper.limits().count("\n") == 1 + len(FORMS)
