# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong with the states of apex's optimizers, their masters and checkpoints.

As in test_apex_defects.py, each test would fail on apex's behavior.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot
from support.compare import assert_all_same_bits, assert_rounded, assert_same_bits
from test_apex_defects import EVERY_OPTIMIZER, make, train
from test_optim_specs import Case, oracle_at

from torchfuse.optimizers._hyper_params import PAIRS, numbers
from torchfuse.testing import OptimSpec

HALF_DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@EVERY_OPTIMIZER
@HALF_DTYPES
def test_a_checkpoint_keeps_the_fp32_states_of_16_bit_parameters(
    spec: OptimSpec, dtype: torch.dtype
) -> None:
    params = make_params(dtype=dtype)
    optimizer = make(spec, params)
    train(optimizer, params, [1, 2])
    loaded = make(spec, make_params(dtype=dtype))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved, restored = optimizer.state_dict()["state"], loaded.state_dict()["state"]
    for index in saved:
        assert_all_same_bits(restored[index], saved[index])
        for name, tensor in restored[index].items():
            assert tensor.dtype == torch.float32, name


@EVERY_OPTIMIZER
@HALF_DTYPES
@pytest.mark.parametrize("capturable", [False, True], ids=["numbers", "capturable"])
def test_masters_are_used_and_hold_more_than_the_parameters(
    spec: OptimSpec, dtype: torch.dtype, capturable: bool
) -> None:
    """Steps too small for the parameter's dtype add up in the master."""
    param = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = make(spec, [param], master_weights=True, lr=spec.grid[-1]["lr"] / 100)
    if capturable:
        optimizer.make_capturable()
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = optimizer.state[param]["master_param"]
    assert master.dtype == torch.float32
    assert bool((master != 1).all())
    assert_same_bits(param.detach(), master.to(dtype))


@EVERY_OPTIMIZER
def test_states_of_16_bit_parameters_do_not_underflow(spec: OptimSpec) -> None:
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
    param.grad = torch.full((8,), 1e-4, dtype=torch.float16)
    optimizer = make(spec, [param], max_grad_norm=None)
    optimizer.step()
    oracle = spec.oracle([torch.ones(8)], {**spec.grid[-1], "max_grad_norm": None})
    oracle.step([param.grad])
    for name, exact in oracle.states[0].items():
        torch.testing.assert_close(
            optimizer.state[param][name].double(), exact, rtol=1e-6, atol=1e-30, msg=name
        )


@EVERY_OPTIMIZER
def test_masters_are_restored_exactly_and_made_from_the_weights_of_the_first_step(
    spec: OptimSpec,
) -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = make(spec, params, master_weights=True)
    with torch.no_grad():
        for param in params:
            param.fill_(
                0.5
            )  # as if the model's checkpoint were loaded after the optimizer was made
    train(optimizer, params, [1])
    for param in params:
        assert float((optimizer.state[param]["master_param"] - 0.5).abs().max()) < 0.25
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = copy.deepcopy(params)
    loaded = make(spec, others, master_weights=True)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for mine, theirs in zip(others, params, strict=True):
        assert_same_bits(
            loaded.state[mine]["master_param"], optimizer.state[theirs]["master_param"]
        )


@EVERY_OPTIMIZER
def test_a_checkpoint_saved_before_the_first_step_loads(spec: OptimSpec) -> None:
    params, others = make_params(), make_params()
    loaded = make(spec, others)
    loaded.load_state_dict(pickle.loads(pickle.dumps(make(spec, params).state_dict())))
    train(loaded, others, [1])
    train(reference := make(spec, params), params, [1])
    assert_all_same_bits(snapshot(loaded), snapshot(reference))


@EVERY_OPTIMIZER
@HALF_DTYPES
@pytest.mark.parametrize("capturable", [False, True], ids=["numbers", "capturable"])
def test_states_of_16_bit_parameters_are_not_rounded_to_their_dtype(
    spec: OptimSpec, dtype: torch.dtype, capturable: bool
) -> None:
    """apex's capturable Adam does so in every step; a bf16 second moment then ceases to decay."""
    params = make_params(dtype=dtype)
    optimizer = make(spec, params)
    if capturable:
        optimizer.make_capturable()
    for step in (1, 2, 3):
        oracle = oracle_at(Case(spec, dict(spec.grid[-1])), optimizer, params)
        set_grads(params, random_grads(params, step, scale=0.1**step))
        optimizer.step()
        oracle.step([p.grad for p in params])
        for index, param in enumerate(params):
            for name, exact in oracle.states[index].items():
                stored = optimizer.state[param][name].float()
                assert_rounded(stored, exact, f"{name}[{index}]")


@EVERY_OPTIMIZER
@pytest.mark.parametrize("master_weights", [False, True])
def test_bf16_parameters_are_updated(spec: OptimSpec, master_weights: bool) -> None:
    """apex's LAMB, SGD, NovoGrad and Adagrad know fp32 and fp16 alone."""
    params = make_params(dtype=torch.bfloat16)
    oracle = spec.oracle(params, spec.grid[-1])
    optimizer = make(spec, params, master_weights=master_weights)
    set_grads(params, random_grads(params, 1))
    optimizer.step()
    oracle.step([p.grad for p in params])
    for index, (param, exact) in enumerate(zip(params, oracle.params, strict=True)):
        assert_rounded(param, exact, f"param[{index}]", slack=1e-6)


@EVERY_OPTIMIZER
def test_a_checkpoint_follows_the_parameters_to_their_device(
    spec: OptimSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apex keeps counts, learning rates and norms in the groups, and torch moves no group.

    The meta device stands for the other one. Its tensors have no values to be checked.
    """
    params = make_params(dtype=torch.bfloat16)
    optimizer = make(spec, params, master_weights=True)
    optimizer.make_capturable()
    train(optimizer, params, [1])
    saved = optimizer.state_dict()
    of_state = {"step", *(name for state in saved["state"].values() for name in state)}
    assert not of_state & set(saved["param_groups"][0])
    others = [torch.nn.Parameter(param.detach().to("meta")) for param in params]
    loaded = make(spec, others, master_weights=True)
    monkeypatch.setattr(loaded, "_check_group", lambda *_: None)
    loaded.load_state_dict(saved)
    for other, state in zip(others, saved["state"].values(), strict=True):
        assert {name: t.device.type for name, t in loaded.state[other].items()} == dict.fromkeys(
            state, "meta"
        )
    for name in numbers(optimizer._algorithm):
        value = loaded.param_groups[0][name]
        for tensor in value if name in PAIRS else [value]:
            assert tensor.device.type == "meta", name
