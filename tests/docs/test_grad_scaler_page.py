# SPDX-License-Identifier: BSD-3-Clause
"""Every rule of docs/grad_scaler.md has tests, in Python and in C++."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: The tests of each rule. What has none in C++ is of Python alone.
RULES: dict[str, tuple[list[str], list[str]]] = {
    "defaults: `init_scale` 2^16, factors 2 and 0.5, `growth_interval` 2000": (
        ["test_is_a_torch_scaler_with_its_defaults"],
        ["GradScalerRules.HasTorchsDefaults"],
    ),
    "growth factor above 1, backoff factor below 1": (
        ["test_factors_out_of_range"],
        ["GradScalerRules.SettersCheckTheirValues"],
    ),
    "CUDA asked for and absent: a warning, and disabled": (
        ["test_cuda_scaler_without_cuda_warns_and_is_disabled"],
        ["GradScalerRules.IsDisabledWhereCudaIsMissing"],
    ),
    "disabled: everything passes through, closures included": (
        ["test_disabled_passes_everything_through"],
        ["GradScalerRules.DisabledPassesThrough"],
    ),
    "the first `scale` creates the scale; other calls before it fail": (
        ["test_calls_before_scale"],
        ["GradScalerRules.RefusesCallsOutOfOrder"],
    ),
    "`scale`: outputs times the scale, with torch's promotion of types": (
        ["test_scale_one_tensor"],
        ["GradScaler.ScalesOneAndManyTensors"],
    ),
    "`scale`: lists and tuples, nested": (
        ["test_scale_many_tensors"],
        ["GradScaler.ScalesOneAndManyTensors"],
    ),
    "`scale`: other iterables come back lazily; anything else fails": (
        ["test_scale_lazy_iterable", "test_scale_refuses_other_things"],
        [],
    ),
    "`unscale_` divides gradients in place, also when one overflows": (
        ["test_unscale_divides_in_place", "test_unscale_records_overflow"],
        ["GradScaler.StepsTorchsOptimizerWithUnscaledGradients"],
    ),
    "`unscale_` at most once between updates, and not after `step`": (
        ["test_calls_out_of_order"],
        ["GradScalerRules.RefusesCallsOutOfOrder"],
    ),
    "fp16 gradients are refused by `unscale_`, and accepted by a fused step": (
        [
            "test_fp16_gradients_are_refused",
            "test_sixteen_bit_gradients_are_checked_inside_the_step",
        ],
        ["GradScalerRules.RefusesToUnscaleHalfGradients"],
    ),
    "sparse gradients are unscaled through their values, fp16 ones coalesced": (
        ["test_sparse_gradients"],
        ["GradScalerRules.UnscalesSparseGradients"],
    ),
    "`step` unscales if needed, skips on overflow, returns what the optimizer returns": (
        ["test_torch_optimizer_under_ours_equals_torch"],
        ["GradScaler.SkipsTorchsOptimizerOnOverflow"],
    ),
    "optimizers with `_step_supports_amp_scaling` get `grad_scale` and `found_inf` (Python)": (
        [
            "test_optimizer_that_scales_itself_under_both",
            "test_a_wrapper_around_ours_gets_torchs_protocol",
        ],
        [],
    ),
    "a user's own `grad_scale` is one more factor (Python)": (
        ["test_a_users_own_grad_scale_is_one_more_factor"],
        [],
    ),
    "no closures": (
        ["test_closures_are_refused"],
        ["GradScalerRules.RefusesClosures"],
    ),
    "no gradients: `step` of other optimizers and `update` fail": (
        ["test_step_without_gradients"],
        ["GradScalerRules.RefusesStepsWithoutGradients"],
    ),
    "each optimizer skips by itself, the scale backs off once": (
        ["test_two_optimizers_share_one_scale"],
        ["GradScaler.OverflowInOneOptimizerSkipsOnlyThatOne"],
    ),
    "`update`: back off at an overflow, grow after `growth_interval` clean steps": (
        ["test_torch_optimizer_under_ours_equals_torch"],
        ["GradScaler.GrowsAndBacksOffAsTorch"],
    ),
    "growth when the tracker equals the interval, not above it": (
        ["test_interval_below_the_tracker_waits_for_an_overflow"],
        ["GradScaler.AnIntervalBelowTheTrackerWaitsForAnOverflow"],
    ),
    "the scale grows to 2^126 at most, and falls to 2^-126 at least": (
        ["test_the_scale_stays_where_fp32_holds_its_reciprocal"],
        ["GradScaler.TheScaleStaysWhereFp32HoldsItsReciprocal"],
    ),
    "`update(new_scale)`: a number, or a tensor whose value is copied": (
        ["test_update_with_new_scale", "test_later_changes_of_a_new_scale_tensor_are_not_seen"],
        ["GradScalerRules.TakesANewScale"],
    ),
    "getters and setters between steps": (
        ["test_setters"],
        ["GradScalerRules.SettersCheckTheirValues"],
    ),
    "state dicts go to and from torch's scaler": (
        ["test_state_dict_moves_between_scalers"],
        ["GradScalerState.SurvivesSaveAndLoad"],
    ),
    "an empty state dict is refused": (
        ["test_empty_state_dict"],
        ["GradScalerState.ArchiveOfADisabledScaler"],
    ),
    "pickling and copying between iterations, refused within one": (
        ["test_copies_in_the_middle_of_training", "test_no_copies_inside_an_iteration"],
        ["GradScalerState.MovesWithTheScaler"],
    ),
    "several optimizers with one loss, several losses, accumulation, gradient penalty, clipping": (
        ["test_program_trains_as_under_torch"],
        [
            "GradScalerPrograms.SeveralOptimizersWithOneLoss",
            "GradScalerPrograms.SeveralLosses",
            "GradScalerPrograms.GradientAccumulation",
            "GradScalerPrograms.GradientPenalty",
            "GradScalerPrograms.ClippingBetweenUnscaleAndStep",
        ],
    ),
    "overflows in a row that back the scale off (apex's and Megatron's rule)": (
        ["test_hysteresis_backs_off_after_overflows_in_a_row"],
        ["GradScaler.HysteresisForgivesSingleOverflows"],
    ),
    "bounds of the scale": (
        ["test_the_scale_stays_between_its_bounds"],
        ["GradScalerExtras.TheScaleStaysBetweenItsBounds"],
    ),
    "a static scale": (
        ["test_a_static_scale_stays_and_still_skips"],
        ["GradScalerExtras.AStaticScaleStaysAndStillSkips"],
    ),
    "`unscale_` takes fp16 gradients": (
        ["test_fp16_gradients_on_request"],
        ["GradScalerExtras.Fp16GradientsOnRequest"],
    ),
    "iterations without any gradient": (
        ["test_no_gradients_at_all_on_request"],
        ["GradScalerExtras.NoGradientsAtAllOnRequest"],
    ),
    "processes skip together": (
        ["test_processes_skip_together"],
        ["GradScalerExtras.AnUnknownProcessGroupIsNamed"],
    ),
    "skips, as numbers or on the device": (
        ["test_skips_are_counted"],
        ["GradScalerExtras.SkipsAreCounted"],
    ),
    "the scale over time; [a tutorial](tutorials.md#how-the-scale-moves)": (
        ["test_history_is_a_ring_of_the_last_iterations"],
        ["GradScalerExtras.HistoryIsARingOfTheLastIterations"],
    ),
}


def sources(pattern: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob(pattern))


def test_every_rule_of_the_page_is_here() -> None:
    page = (ROOT / "docs" / "grad_scaler.md").read_text(encoding="utf-8")
    rules = re.findall(r"^- (.*)$", page.partition("## The rules of torch")[2], re.MULTILINE)
    rows = re.findall(r"^\| `.*` \| (.*) \|$", page, re.MULTILINE)
    assert rules + rows == list(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_its_tests_exist(rule: str) -> None:
    python, cpp = RULES[rule]
    assert python
    for name in python:
        assert f"def {name}(" in sources("python/amp/test_*.py")
    for name in cpp:
        suite, _, test = name.partition(".")
        assert f"TEST({suite}, {test})" in sources("cpp/api/amp/test_*.cpp")
