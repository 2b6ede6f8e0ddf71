# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer, by its entry in torchfuse.testing.optim_specs: formula, skipping, state.

A new optimizer gets these tests with its entry; what only one optimizer has is tested beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.adam import (
    DEFAULT_SHAPES,
    make_params,
    random_grads,
    set_grads,
    snapshot,
    through_file,
    train,
)
from support.compare import assert_all_same_bits, assert_rounded, assert_same_bits
from torch import Tensor

import torchfuse
from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.state import names_of
from torchfuse.testing import OPTIM_SPECS, OptimSpec, ReferenceOptimizer, assert_close_to_torch

SHAPES = (*DEFAULT_SHAPES, (0,), (1,))
#: Of several chunks and threads, and smaller.
LARGE_SHAPES = ((70_003,), (33, 5), (0,), (300_001,))


@dataclass(frozen=True)
class Case:
    """An optimizer under one choice of hyper-parameters."""

    spec: OptimSpec
    hyper: dict[str, Any]

    def ours(self, params: Any, **options: Any) -> FusedOptimizer:
        return self.spec.optimizer(params, **{**self.hyper, **options})

    def torchs(self, params: Any) -> torch.optim.Optimizer | None:
        """The same optimizer of torch.optim, if it has one."""
        make = self.spec.torch_optimizer
        return None if make is None else make(params, **self.hyper)

    def choices(self) -> dict[str, Any]:
        """What varies from case to case."""
        name = self.spec.algorithm
        return {"algorithm": name, **{f"{name}.{key}": value for key, value in self.hyper.items()}}

    def __str__(self) -> str:
        values = "-".join(f"{name}={value}" for name, value in self.hyper.items())
        return f"{self.spec.algorithm}-{values}"


@dataclass(frozen=True)
class Mode:
    """How parameters and states are stored."""

    name: str
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CASES = [Case(spec, dict(hyper)) for spec in OPTIM_SPECS for hyper in spec.grid]
CASES_OF_TORCH = [case for case in CASES if case.torchs([torch.zeros(1)]) is not None]
FIRST_CASES = [Case(spec, dict(spec.grid[0])) for spec in OPTIM_SPECS]
LAST_CASES = [Case(spec, dict(spec.grid[-1])) for spec in OPTIM_SPECS]
FP32 = Mode("fp32", torch.float32)
BF16_MASTER = Mode("bf16-master", torch.bfloat16, {"master_weights": True})
BF16_STATE: dict[str, Any] = {"state_dtype": torch.bfloat16}
MODES = [
    FP32,
    Mode("fp64", torch.float64),
    Mode("fp16", torch.float16),
    Mode("bf16", torch.bfloat16),
    Mode("fp16-master", torch.float16, {"master_weights": True}),
    BF16_MASTER,
    Mode("bf16-state", torch.bfloat16, BF16_STATE),
    Mode("fp32-bf16-state", torch.float32, BF16_STATE),
    Mode("fp16-master-bf16-state", torch.float16, BF16_STATE | {"master_weights": True}),
]
REMAINDERS: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}
EMA: dict[str, Any] = {"ema_decay": 0.75, "ema_warmup": True, "ema_start_step": 1}
STOCHASTIC: dict[str, Any] = {"stochastic_rounding": True, "seed": 11}
#: Also those whose formula has tests of its own.
STORAGES = [
    *MODES,
    Mode("bf16-remainder", torch.bfloat16, REMAINDERS),
    Mode("bf16-stochastic", torch.bfloat16, STOCHASTIC),
    Mode("fp32-ema", torch.float32, EMA),
    Mode("fp16-ema", torch.float16, EMA),
    Mode("bf16-remainder-ema", torch.bfloat16, REMAINDERS | EMA),
    Mode("bf16-stochastic-ema", torch.bfloat16, STOCHASTIC | EMA),
]

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_optimizer = pytest.mark.parametrize("case", LAST_CASES, ids=str)
every_mode = pytest.mark.parametrize("mode", MODES, ids=str)
every_storage = pytest.mark.parametrize("mode", STORAGES, ids=str)


def make(spec: OptimSpec, params: Any, **options: Any) -> Any:
    """The optimizer of every_optimizer's case."""
    return Case(spec, dict(spec.grid[-1])).ours(params, **options)


def tensors_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The algorithm's own states."""
    return {name: state[name] for name in state if name not in ("step", "master_param")}


def oracle_at(
    case: Case, optimizer: FusedOptimizer, params: Sequence[Tensor], **options: Any
) -> ReferenceOptimizer:
    """The oracle with the present values of `optimizer`."""
    sources = [optimizer.state[p].get("master_param", p) for p in params]
    oracle = case.spec.oracle(sources, case.hyper, **options)
    for index, param in enumerate(params):
        state = optimizer.state[param]
        oracle.states[index] = {
            name: tensor.to("cpu", torch.float64, copy=True)
            for name, tensor in tensors_of(state).items()
        }
        oracle.steps[index] = int(state.get("step", torch.zeros(())))
    return oracle


def test_every_optimizer_has_an_entry() -> None:
    exported = {
        value
        for name in torchfuse.optimizers.__all__
        if (value := getattr(torchfuse.optimizers, name)) is not FusedOptimizer
        and isinstance(value, type)
    }
    assert {spec.optimizer for spec in OPTIM_SPECS} == exported


# --- The formula ---------------------------------------------------------------------------------


@pytest.mark.combinations
@every_mode
@every_case
def test_each_step_is_the_formula_rounded_once(case: Case, mode: Mode, device: str) -> None:
    params = make_params(SHAPES, mode.dtype, device)
    optimizer = case.ours(params, **mode.options)
    numbers = names_of(case.spec.algorithm)[1]
    slack = 1e-14 if mode.dtype == torch.float64 else 1e-6
    # What is computed from a bf16 state has its precision.
    from_stored = case.spec.updates_from_stored_states and "state_dtype" in mode.options
    param_slack = 1e-2 if from_stored else slack
    for step in (1, 2, 3):
        oracle = oracle_at(case, optimizer, params)
        train(optimizer, params, [step])
        oracle.step([p.grad for p in params])
        for index, param in enumerate(params):
            state = optimizer.state[param]
            assert float(state["step"]) == step
            source = state.get("master_param", param)
            assert ("master_param" in state) == bool(mode.options.get("master_weights"))
            assert_rounded(source.cpu(), oracle.params[index], f"param[{index}]", param_slack)
            assert_same_bits(param.detach(), source.detach().to(mode.dtype))
            assert set(tensors_of(state)) == set(oracle.states[index])
            for name, exact in oracle.states[index].items():
                assert_rounded(state[name].cpu(), exact, f"{name}[{index}]", slack)
                # As fp32 where nothing else is asked for: 16-bit states underflow.
                wide = torch.float64 if mode.dtype == torch.float64 else torch.float32
                expected = wide if name in numbers else mode.options.get("state_dtype", wide)
                assert state[name].dtype == expected


@pytest.mark.combinations
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled-and-clipped"])
@every_case
def test_twenty_steps_stay_close_to_fp64(case: Case, scaled: bool, device: str) -> None:
    params = make_params(SHAPES, device=device)
    max_grad_norm = 0.5 if scaled else None
    optimizer = case.ours(params, max_grad_norm=max_grad_norm)
    oracle = case.spec.oracle(params, case.hyper, max_grad_norm=max_grad_norm)
    scale = 1024.0 if scaled else 1.0
    for step in range(1, 21):
        grads = random_grads(params, step, scale=scale)
        set_grads(params, grads)
        if scaled:
            optimizer.grad_scale = torch.tensor(scale, device=device)
            optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
        oracle.step(grads, scale)
        assert_all_same_bits(
            {str(i): p.grad for i, p in enumerate(params) if p.grad is not None},
            {str(i): grad for i, grad in enumerate(grads)},
        )
    assert_close_to_torch(params, oracle.params)


@pytest.mark.combinations
@pytest.mark.parametrize("case", CASES_OF_TORCH, ids=str)
def test_twenty_steps_stay_close_to_torch(case: Case, device: str) -> None:
    params, theirs = make_params(SHAPES, device=device), make_params(SHAPES, device=device)
    optimizer, reference = case.ours(params), case.torchs(theirs)
    for step in range(1, 21):
        for both, model in ((params, optimizer), (theirs, reference)):
            set_grads(both, random_grads(both, step))
            model.step()
    assert_close_to_torch(params, theirs)


@pytest.mark.combinations
@every_mode
@every_optimizer
def test_same_bits_at_every_instruction_level_and_number_of_threads(case: Case, mode: Mode) -> None:
    results = []
    levels = (("baseline", 1), ("baseline", 3), ("avx2", 2), ("avx512", 1), ("avx512_bf16", 2))
    for level, threads in levels:
        try:
            torchfuse._C.set_cpu_isa(level)
        except RuntimeError:  # this processor lacks it
            break
        torch.set_num_threads(threads)
        params = make_params(LARGE_SHAPES, mode.dtype)
        optimizer = case.ours(params, max_grad_norm=0.5, **mode.options)
        train(optimizer, params, [1, 2])
        results.append(snapshot(optimizer) | {"norm": torch.as_tensor(optimizer.grad_norm())})
    for result in results[1:]:
        assert_all_same_bits(result, results[0])


# --- Skipping ------------------------------------------------------------------------------------


@pytest.mark.combinations
@every_storage
@every_optimizer
def test_skipped_steps_leave_no_trace(case: Case, mode: Mode, device: str) -> None:
    params, others = (make_params(SHAPES, mode.dtype, device) for _ in range(2))
    optimizer, reference = case.ours(params, **mode.options), case.ours(others, **mode.options)
    for seed, found_inf in enumerate((1.0, 0.0, 2.0, 0.0)):
        optimizer.found_inf = torch.full((), found_inf, device=device)
        train(optimizer, params, [seed])
        if not found_inf:
            train(reference, others, [seed])
        for param, other in zip(params, others, strict=True):
            assert_same_bits(param.detach(), other.detach())
            count = reference.state[other]["step"] if seed else torch.zeros(())
            assert float(optimizer.state[param]["step"]) == float(count)
        skipped = optimizer.last_step_skipped()
        assert float(skipped) == float(found_inf != 0.0)
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))


@every_optimizer
def test_a_non_finite_gradient_skips_the_step_on_request(case: Case, device: str) -> None:
    params = make_params(SHAPES, device=device)
    optimizer = case.ours(params, skip_non_finite=True)
    train(optimizer, params, [1])
    set_grads(params, random_grads(params, 2))
    params[1].grad[2, 3] = float("inf")
    before = snapshot(optimizer)
    optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)
    skipped = optimizer.last_step_skipped()
    assert float(skipped) == 1.0


# --- State dicts ---------------------------------------------------------------------------------


@pytest.mark.combinations
@every_storage
@every_optimizer
def test_a_loaded_checkpoint_goes_on_with_the_same_bits(
    case: Case, mode: Mode, device: str
) -> None:
    params = make_params(SHAPES, mode.dtype, device)
    optimizer = case.ours(params, **mode.options)
    train(optimizer, params, [1, 2])
    saved = through_file(optimizer.state_dict())
    others = make_params(SHAPES, mode.dtype, device, seed=5)
    loaded = case.ours(others, **mode.options)
    train(loaded, others, [7])  # its states are replaced
    with torch.no_grad():
        for other, param in zip(others, params, strict=True):
            other.copy_(param)
    loaded.load_state_dict(saved)
    train(optimizer, params, [3])
    train(loaded, others, [3])
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))
