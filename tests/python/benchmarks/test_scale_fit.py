# SPDX-License-Identifier: BSD-3-Clause
"""Slopes and costs are those of times whose growth is known."""

from __future__ import annotations

import pytest

import scale_fit

SIZES = [1, 10, 100, 1000, 10_000]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_slope_is_the_power(power: float) -> None:
    assert scale_fit.slope(SIZES, [3e-6 * n**power for n in SIZES]) == pytest.approx(power)


def test_a_slope_needs_two_sizes() -> None:
    with pytest.raises(ValueError, match=r"at least two sizes, got \[8, 8\]"):
        scale_fit.slope([8, 8], [1.0, 2.0])


@pytest.mark.parametrize(("fixed", "unit"), [(2e-5, 3e-7), (0.0, 3e-7), (2e-5, 0.0)])
def test_costs_are_found(fixed: float, unit: float) -> None:
    found = scale_fit.fit(SIZES, [fixed + unit * n for n in SIZES])
    assert found is not None
    assert found["fixed_s"] == pytest.approx(fixed, abs=1e-12)
    assert found["per_unit_s"] == pytest.approx(unit, abs=1e-14)
    assert found["largest_relative_error"] < 1e-6


def test_costs_are_never_negative() -> None:
    """Faster than proportional growth would give a negative fixed cost."""
    fixed, unit = scale_fit.linear([1, 2, 4], [1.0, 4.0, 16.0])
    assert fixed == 0
    # Of the errors unit * n / t - 1 with n / t = 1, 1/2 and 1/4.
    assert unit == pytest.approx((1 + 1 / 2 + 1 / 4) / (1 + 1 / 4 + 1 / 16))
    fixed, unit = scale_fit.linear([1, 2, 4], [4.0, 2.0, 1.0])
    assert unit == 0
    assert fixed == pytest.approx((1 / 4 + 1 / 2 + 1) / (1 / 16 + 1 / 4 + 1))


def test_small_times_count_as_much_as_large_ones() -> None:
    """By absolute errors, the largest point would hide a fixed cost that is off by a half."""
    times = [1e-5 + 1e-8 * n for n in SIZES]
    times[-1] *= 1.3
    fixed, _ = scale_fit.linear(SIZES, times)
    assert fixed == pytest.approx(1e-5, rel=0.05)


def test_segments_and_the_last_slope() -> None:
    found = scale_fit.fit([1, 4, 16, 128, 512], [1.0, 1.0, 2.0, 16.0, 64.0])
    assert found is not None
    slopes = [segment["slope"] for segment in found["segments"]]
    assert slopes == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert (found["segments"][1]["from"], found["segments"][1]["to"]) == (4, 16)
    assert found["last_slope"] == pytest.approx(1.0)  # 16, 128 and 512
    sparse = scale_fit.fit([1, 1000, 1_000_000], [1.0, 1.0, 10.0])
    assert sparse is not None
    assert sparse["last_slope"] == pytest.approx(1 / 3)  # the last two


def test_a_single_point_has_no_fit() -> None:
    assert scale_fit.fit([8], [1.0]) is None
