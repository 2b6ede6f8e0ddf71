# SPDX-License-Identifier: BSD-3-Clause
"""Options of the whole step: attributes of the optimizer that groups, copies and files follow."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedLAMB
from torchfuse.optimizers.options import SAVED_OPTIONS, STEP_OPTIONS
from torchfuse.testing import OPTIM_SPECS, OptimSpec

NAN = float("nan")
#: Values that no default is.
CHANGED: dict[str, Any] = {
    "set_grad_none": False,
    "max_grad_norm": 0.5,
    "skip_norm_above": 50.0,
    "write_back_grads": "clipped",
    "skip_non_finite": True,
    "seed": 7,
    "ema_decay": 0.75,
    "ema_warmup": True,
    "ema_start_step": 1,
}
WHOLE = "at least 0 and less than 2^63, got"
WRONG: list[tuple[str, Any, str]] = [
    *((key, "no", "a bool, got 'no'. Set it") for key in ("set_grad_none", "skip_non_finite")),
    ("ema_warmup", 0.5, "a bool, got 0.5. Set it"),
    ("max_grad_norm", "inf", "None or a number, got str"),
    ("max_grad_norm", torch.ones(()), "None or a number, got Tensor"),
    ("max_grad_norm", -1.0, "None or at least 0, got -1.0"),
    ("max_grad_norm", 10**400, "a number that a float can hold"),
    ("skip_norm_above", NAN, "None or at least 0, got nan"),
    ("skip_norm_above", torch.ones(2), "None, a number or a 1-element tensor of a floating dtype"),
    ("skip_norm_above", torch.tensor(1), "None, a number or a 1-element tensor of a floating dty"),
    ("skip_norm_above", torch.ones((), device="meta"), "None, a number or a 1-element tensor of a"),
    ("write_back_grads", "yes", "a bool, 'unscaled' or 'clipped', got 'yes'"),
    *((key, -1, f"{WHOLE} -1") for key in ("seed", "ema_start_step")),
    ("seed", 2**63, WHOLE),
    ("seed", True, "an int, got bool"),
    ("ema_start_step", 1.5, "an int, got float"),
    ("ema_decay", 1.0, "None or at least 0 and less than 1, got 1.0"),
    ("ema_decay", "0.9", "None or a number, got str"),
]


def saved_of(optimizer: Any) -> dict[str, Any]:
    return {key: getattr(optimizer, key) for key in SAVED_OPTIONS}


def test_every_saved_option_is_changed_here() -> None:
    assert set(CHANGED) == set(SAVED_OPTIONS) == set(STEP_OPTIONS) - {"norm_groups"}


@pytest.mark.parametrize(
    ("key", "value", "text"), WRONG, ids=[f"{w[0]}={w[1]!s:.6}" for w in WRONG]
)
def test_a_wrong_value_is_refused_where_it_is_given(key: str, value: Any, text: str) -> None:
    optimizer = FusedAdam(make_params())
    before = saved_of(optimizer)
    message = f"^FusedAdam: expected {key} to be {re.escape(text)}"
    with pytest.raises((TypeError, ValueError), match=message):
        FusedAdam(make_params(), **{key: value})
    with pytest.raises((TypeError, ValueError), match=message):
        setattr(optimizer, key, value)
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    with pytest.raises((TypeError, ValueError), match=rf"\['{key}'\] to be {re.escape(text)}"):
        optimizer.load_state_dict(saved)
    assert saved_of(optimizer) == before


def test_numbers_of_numpy_are_taken() -> None:
    optimizer = FusedAdam(make_params(), skip_non_finite=np.bool_(True), ema_decay=np.float64(0.5))
    optimizer.max_grad_norm = np.float32(2.0)
    assert optimizer.skip_non_finite is True
    assert [type(n) for n in (optimizer.ema_decay, optimizer.max_grad_norm)] == [float, float]


# --- Groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", CHANGED)
def test_a_group_says_nothing_else_of_the_step(key: str) -> None:
    params, others = make_params(), make_params(seed=2)
    message = (
        f"expected {key} of group {{}} to be .*, as in the optimizer, got .*set optimizer.{key}"
    )
    with pytest.raises(ValueError, match=f"^FusedAdam: {message.format(0)}"):
        FusedAdam([{"params": params, key: CHANGED[key]}])
    optimizer = FusedAdam(params)
    with pytest.raises(ValueError, match=f"^FusedAdam: {message.format(1)}"):
        optimizer.add_param_group({"params": others, key: CHANGED[key]})
    assert len(optimizer.param_groups) == 1
    train(optimizer, params, [0])
    set_grads(params, random_grads(params, 1))
    before = snapshot(optimizer)
    optimizer.param_groups[0][key] = CHANGED[key]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^FusedAdam.step: {message.format(0)}"):
            optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)
    setattr(optimizer, key, CHANGED[key])
    optimizer.step()


def test_a_change_of_the_optimizer_is_compared_with_its_groups() -> None:
    optimizer = FusedAdam(params := make_params(), seed=1)
    optimizer.param_groups[0]["seed"] = 1
    train(optimizer, params, [0])
    optimizer.seed = 2
    with pytest.raises(ValueError, match="expected seed of group 0 to be 2, as in the optimizer"):
        train(optimizer, params, [1])
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "seed": 2, "norm_groups": ["x"]}
    with pytest.raises(ValueError, match="expected norm_groups as an argument of the optimizer"):
        train(optimizer, params, [1])


def test_a_subclass_may_use_the_names_as_its_own() -> None:
    class Early(FusedAdam):
        def __init__(self, params: Any) -> None:
            self.max_grad_norm = 1.0
            super().__init__(params)

    with pytest.raises(AttributeError, match="Early: max_grad_norm was set before super"):
        Early(make_params())

    class Other(FusedAdam):
        seed = 3

    optimizer = Other(params := make_params(), max_grad_norm=0.5)
    train(optimizer, params, [0])
    assert (optimizer.seed, optimizer.defaults["seed"]) == (3, 0)


def test_a_group_may_repeat_the_options() -> None:
    """As those of SAM and of ZeroRedundancyOptimizer do, which copy their arguments into groups."""
    optimizer = FusedAdam([{"params": make_params(), **CHANGED}], **CHANGED)
    assert not CHANGED.keys() & optimizer.param_groups[0].keys()
    optimizer.add_param_group({"params": make_params(seed=2), **CHANGED})
    assert saved_of(optimizer) == CHANGED


# --- Copies and files ----------------------------------------------------------------------------


def by_state_dict(optimizer: Any) -> Any:
    other = FusedAdam(make_params())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


def by_distributed_checkpoint(optimizer: Any) -> Any:
    model = torch.nn.Linear(3, 2)
    own, other = FusedAdam(model.parameters(), **CHANGED), FusedAdam(model.parameters())
    assert own.defaults.keys() == optimizer.defaults.keys()
    set_optimizer_state_dict(model, other, get_optimizer_state_dict(model, own))
    return other


WAYS = {
    "state_dict": by_state_dict,
    "distributed": by_distributed_checkpoint,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "defaults": lambda optimizer: type(optimizer)(make_params(), **optimizer.defaults),
}


@pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.optimizer.__name__)
def test_an_optimizer_is_made_again_of_its_defaults(spec: OptimSpec) -> None:
    optimizer = spec.optimizer(make_params(), **spec.grid[-1], seed=5)
    again: Any = spec.optimizer
    assert again(make_params(), **optimizer.defaults).defaults == optimizer.defaults


def test_a_pickle_that_lacks_an_option_gets_its_default() -> None:
    optimizer = FusedAdam(make_params(), seed=5)
    for key in ("norm_groups", "skip_norm_above"):
        del optimizer.defaults[key]
    other = pickle.loads(pickle.dumps(optimizer))
    train(other, other.param_groups[0]["params"], [0])
    assert (other.seed, other.skip_norm_above) == (5, None)


@pytest.mark.parametrize("way", WAYS)
def test_the_options_go_along(way: str) -> None:
    optimizer = FusedAdam(make_params())
    for key, value in CHANGED.items():
        setattr(optimizer, key, value)
    assert saved_of(WAYS[way](optimizer)) == CHANGED
    for group in optimizer.state_dict()["param_groups"]:
        assert {key: group[key] for key in CHANGED} == CHANGED


def test_a_flat_distributed_checkpoint_keeps_those_of_the_program() -> None:
    """It restores what groups hold: a program gives the options again."""
    model = torch.nn.Linear(3, 2)
    own, other = FusedAdam(model.parameters(), **CHANGED), FusedAdam(model.parameters(), seed=3)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model, own, options=flat)
    set_optimizer_state_dict(model, other, saved, options=flat)
    assert (other.seed, other.max_grad_norm) == (3, None)


class Sam(Optimizer):
    """In the manner of SAM: a base optimizer on the same groups, which hold its arguments."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Lookahead(Optimizer):
    """In the manner of Lookahead: groups, states and defaults of the optimizer that it holds."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("wrap", ["sam", "lookahead"])
def test_optimizers_around_ours_clip_as_ours(wrap: str) -> None:
    params, others = make_params(), make_params()
    options = {"lr": 0.1, "max_grad_norm": 0.5}
    reference = FusedAdam(others, **options)
    around = {
        "sam": lambda: Sam(params, FusedAdam, **options),
        "lookahead": lambda: Lookahead(FusedAdam(params, **options)),
    }[wrap]()
    train(around, params, range(3))
    train(reference, others, range(3))
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)


# --- skip_norm_above -----------------------------------------------------------------------------


def stepped(norm: float, **options: Any) -> tuple[Any, torch.nn.Parameter]:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedLAMB([param], lr=0.1, max_grad_norm=None, **options)
    param.grad = torch.full((4,), norm / 2)
    optimizer.step()
    return optimizer, param


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("norm", "skipped"), [(2.0, False), (3.0, True), (float("inf"), True)])
def test_a_step_above_the_threshold_is_skipped(
    norm: float, skipped: bool, as_tensor: bool, device: str
) -> None:
    threshold: Any = torch.tensor([2.0], dtype=torch.float64, device=device) if as_tensor else 2.0
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedLAMB([param], lr=0.1, max_grad_norm=None, skip_norm_above=threshold)
    for count in (0.0, 1.0):
        optimizer.zero_grad()
        param.grad = torch.full((4,), norm / 2, device=device)
        before = snapshot(optimizer)
        optimizer.step()
        assert float(optimizer.last_step_skipped()) == float(skipped)
        assert float(optimizer.grad_norm()) == norm
        if skipped:
            assert torch.equal(param.detach(), torch.ones(4, device=device))
            assert not count or (assert_all_same_bits(snapshot(optimizer), before) is None)
        assert float(optimizer.state[param]["step"]) == (0.0 if skipped else count + 1.0)


def test_a_running_statistic_is_read_in_each_step() -> None:
    threshold = torch.tensor(1.0)
    optimizer, _ = stepped(4.0, skip_norm_above=threshold)
    assert float(optimizer.last_step_skipped()) == 1.0
    threshold.fill_(5.0)
    optimizer.step()
    assert float(optimizer.last_step_skipped()) == 0.0
    # It is the program's own: not in files, and not replaced by them.
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["skip_norm_above"] is None
    optimizer.load_state_dict(saved)
    assert optimizer.skip_norm_above is threshold


@pytest.mark.parametrize(("value", "skipped"), [(NAN, 0.0), (-1.0, 1.0)])
def test_a_statistic_of_any_value_is_compared(value: float, skipped: float) -> None:
    """A running mean of norms becomes NaN with one of them."""
    optimizer, _ = stepped(1.0, skip_norm_above=torch.tensor(value))
    assert float(optimizer.last_step_skipped()) == skipped


def test_a_nan_norm_is_above_nothing() -> None:
    optimizer, param = stepped(NAN, skip_norm_above=1.0)
    assert float(optimizer.last_step_skipped()) == 0.0
    assert bool(param.isnan().all())


@pytest.mark.parametrize("scaler_type", [torch.amp.GradScaler, GradScaler], ids=["torchs", "ours"])
def test_a_skipped_norm_is_no_overflow(scaler_type: Any) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=0.1, skip_norm_above=1.0)
    scaler = scaler_type("cpu", init_scale=8.0, growth_interval=2)
    for scale in (8.0, 16.0):
        scaler.scale((3.0 * param).sum()).backward()
        scaler.step(optimizer)
        assert float(optimizer.last_step_skipped()) == 1.0
        assert float(optimizer.grad_norm()) == pytest.approx(6.0 * (1 if scale == 8.0 else 2))
        scaler.update()
        assert scaler.get_scale() == scale
    assert torch.equal(param.detach(), torch.ones(4))
