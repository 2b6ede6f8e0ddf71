# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam with moments of any dtype: `state_dtype`, `exp_avg_dtype`, `exp_avg_sq_dtype`."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.adam import Config, exact_adam_step, make_params, random_grads, set_grads, snapshot
from support.adam import train as train_steps
from support.compare import assert_all_same_bits, assert_rounded, assert_same_bits

import torchfuse
from torchfuse.optimizers import FusedAdam

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
SHAPES = ((257,), (33, 7), (1,), (0,), (64, 65))
CONFIG = Config(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)

MOMENTS = [(BF16, BF16), (BF16, F32), (F32, BF16), (F16, BF16), (F16, F16)]
STORAGE = [(F32, False), (BF16, False), (BF16, True), (F16, False), (F16, True)]


def dtypes_of(optimizer: FusedAdam, param: torch.Tensor) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in optimizer.state[param].items() if name != "step"}


@pytest.mark.combinations
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_each_step_is_exact_then_rounded(
    storage: tuple[torch.dtype, bool],
    moments: tuple[torch.dtype, torch.dtype],
    amsgrad: bool,
    device: str,
) -> None:
    """Arithmetic does not know how moments are stored: every result is rounded once, by itself."""
    dtype, masters = storage
    config = Config(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, amsgrad=amsgrad)
    params = make_params(SHAPES, dtype, device)
    optimizer = config.ours(
        params,
        master_weights=masters,
        exp_avg_dtype=moments[0],
        exp_avg_sq_dtype=moments[1],
    )
    train_steps(optimizer, params, [0])
    for seed in range(1, 5):
        states = [{k: t.clone() for k, t in optimizer.state[p].items()} for p in params]
        before = [
            state.get("master_param", p.detach().clone())
            for p, state in zip(params, states, strict=True)
        ]
        train_steps(optimizer, params, [seed])
        for index, p in enumerate(params):
            state = optimizer.state[p]
            exact, exact_moments = exact_adam_step(
                config, before[index], p.grad, states[index], seed + 1
            )
            source = state["master_param"] if masters else p
            assert_rounded(source, exact, f"param[{index}]", slack=2e-6)
            assert_same_bits(p, source.to(dtype))
            assert state["exp_avg"].dtype == moments[0]
            assert set(exact_moments) == set(state) - {"step", "master_param"}
            for name, value in exact_moments.items():
                assert state[name].dtype == (moments[0] if name == "exp_avg" else moments[1])
                assert_rounded(state[name], value, f"{name}[{index}]", slack=2e-6)


def test_state_dtype_is_short_for_all_and_an_option_by_name_wins() -> None:
    param = make_params([(5,)])
    everything: list[tuple[dict[str, Any], torch.dtype, torch.dtype]] = [
        ({}, F32, F32),
        ({"state_dtype": BF16}, BF16, BF16),
        ({"state_dtype": BF16, "exp_avg_sq_dtype": F32}, BF16, F32),
        ({"state_dtype": BF16, "exp_avg_dtype": F16}, F16, BF16),
        ({"exp_avg_dtype": BF16}, BF16, F32),
    ]
    for options, first, second in everything:
        optimizer = FusedAdam(copy.deepcopy(param), amsgrad=True, **options)
        own = optimizer.param_groups[0]["params"]
        train_steps(optimizer, own, [1])
        expected = {"exp_avg": first, "exp_avg_sq": second, "max_exp_avg_sq": second}
        assert dtypes_of(optimizer, own[0]) == expected


def test_16_bit_parameters_have_fp32_moments_unless_told_otherwise() -> None:
    params = make_params([(5,)], F16)
    optimizer = FusedAdam(params, exp_avg_dtype=BF16)
    train_steps(optimizer, params, [1])
    assert dtypes_of(optimizer, params[0]) == {"exp_avg": BF16, "exp_avg_sq": F32}


def test_each_group_has_its_own_dtypes(device: str) -> None:
    """Tensors stored differently are updated in one step, each as if it were alone."""
    choices: list[dict[str, Any]] = [
        {"exp_avg_dtype": BF16},
        {"state_dtype": F16},
        {},
        {"exp_avg_dtype": F16, "exp_avg_sq_dtype": BF16},
    ]
    together = [make_params([(301,)], F32, device, seed=seed)[0] for seed in range(4)]
    alone = copy.deepcopy(together)
    joint = CONFIG.ours([{"params": [p], **c} for p, c in zip(together, choices, strict=True)])
    for seed in range(3):
        set_grads(together, random_grads(together, seed))
        set_grads(alone, random_grads(alone, seed))
        joint.step()
    for p, twin, choice in zip(together, alone, choices, strict=True):
        single = CONFIG.ours([twin], **choice)
        index = next(i for i, q in enumerate(alone) if q is twin)
        for seed in range(3):
            set_grads([twin], [random_grads(alone, seed)[index]])
            single.step()
        assert_same_bits(p, twin)
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(joint.state[p][name], single.state[twin][name], name)


@pytest.mark.parametrize("grad_dtype", [F32, F16, BF16], ids=str)
def test_gradients_of_any_dtype(grad_dtype: torch.dtype, device: str) -> None:
    params = [p.detach() for p in make_params(SHAPES, BF16, device)]
    twins = [p.clone() for p in params]
    grads = [g.to(grad_dtype) for g in random_grads(params, 1)]
    results = []
    for tensors, given in ((params, grads), (twins, [g.float() for g in grads])):
        first = [torch.zeros_like(p) for p in tensors]
        second = [torch.zeros_like(p, dtype=F32) for p in tensors]
        steps = [torch.zeros((), device=device) for _ in tensors]
        hyper = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
        torchfuse.ops.fused_adam_(tensors, given, first, second, [], steps, [], **hyper)
        results.append((*tensors, *first, *second))
    for mine, theirs in zip(*results, strict=True):
        assert_same_bits(mine, theirs)


# --- Checkpoints ---------------------------------------------------------------------------------


def reload(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded


def test_a_checkpoint_keeps_dtypes_and_goes_on_with_the_same_bits(device: str) -> None:
    options: dict[str, Any] = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": F16, "amsgrad": True}
    params = make_params(SHAPES, F32, device)
    optimizer = FusedAdam(params, **options)
    train_steps(optimizer, params, [1, 2])
    saved = reload(optimizer.state_dict())
    assert saved["state"][0]["exp_avg"].dtype == BF16
    assert saved["state"][0]["max_exp_avg_sq"].dtype == F16
    others = copy.deepcopy(params)
    loaded = FusedAdam(others, **options)
    loaded.load_state_dict(saved)
    train_steps(optimizer, params, [3])
    train_steps(loaded, others, [3])
    assert_all_same_bits(snapshot(loaded), snapshot(optimizer))


@pytest.mark.parametrize(
    ("saved_with", "loaded_with"),
    [
        ({"state_dtype": BF16}, {}),
        ({}, {"exp_avg_dtype": BF16}),
        ({"exp_avg_dtype": F16}, {"exp_avg_sq_dtype": BF16}),
    ],
    ids=str,
)
def test_loading_converts_to_the_dtypes_of_the_optimizer(
    saved_with: dict[str, Any], loaded_with: dict[str, Any]
) -> None:
    params = make_params(SHAPES)
    optimizer = FusedAdam(params, lr=1e-2, **saved_with)
    train_steps(optimizer, params, [1, 2])
    others = copy.deepcopy(params)
    loaded = FusedAdam(others, lr=1e-2, **loaded_with)
    wanted = FusedAdam(make_params([(2,)]), **loaded_with)
    own = wanted.param_groups[0]["params"]
    train_steps(wanted, own, [1])
    loaded.load_state_dict(reload(optimizer.state_dict()))
    for p, twin in zip(params, others, strict=True):
        assert dtypes_of(loaded, twin) == dtypes_of(wanted, own[0])
        for name, dtype in dtypes_of(loaded, twin).items():
            assert_same_bits(loaded.state[twin][name], optimizer.state[p][name].to(dtype), name)
    for key in ("state_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        assert loaded.param_groups[0][key] == loaded_with.get(key)
    train_steps(loaded, others, [3])


def test_torch_checkpoints_interchange() -> None:
    params = make_params(SHAPES)
    reference = torch.optim.AdamW(params, lr=1e-2)
    train_steps(reference, params, [1])
    others = copy.deepcopy(params)
    ours = FusedAdam(others, exp_avg_dtype=BF16)
    ours.load_state_dict(reference.state_dict())
    assert ours.state[others[0]]["exp_avg"].dtype == BF16
    back = torch.optim.AdamW(copy.deepcopy(params))
    back.load_state_dict(ours.state_dict())
    train_steps(back, back.param_groups[0]["params"], [2])


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"])
@pytest.mark.parametrize(
    ("dtype", "wanted", "message"),
    [
        (F32, F64, r"torch.float32, torch.bfloat16 or torch.float16 for params\[0\] of dtype"),
        (
            BF16,
            torch.int32,
            r".* or torch.float16 for params\[0\] of dtype torch.bfloat16, got .*int32",
        ),
        (F64, F32, r"torch.float64 for params\[0\] of dtype torch.float64, got torch.float32"),
    ],
    ids=["fp64-state", "integers", "fp64-param"],
)
def test_dtypes_that_do_not_fit(
    name: str, dtype: torch.dtype, wanted: torch.dtype, message: str
) -> None:
    options: dict[str, Any] = {name: wanted}
    where = f"FusedAdam: expected {name} of group 0 to be None, "
    with pytest.raises(ValueError, match=where + message):
        FusedAdam(make_params([(2,)], dtype), **options)


def test_something_else_than_a_dtype() -> None:
    wrong: Any = "bfloat16"
    message = "FusedAdam: expected exp_avg_dtype of group 0 to be None or a torch.dtype, got str"
    with pytest.raises(TypeError, match=message):
        FusedAdam(make_params(), exp_avg_dtype=wrong)


def test_an_fp64_state_of_an_fp32_parameter_is_refused_before_anything_is_written() -> None:
    params = make_params([(3,), (4,)])
    optimizer = FusedAdam(params)
    train_steps(optimizer, params, [1])
    optimizer.state[params[1]]["exp_avg_sq"] = torch.zeros(4, dtype=F64)
    before = snapshot(optimizer)
    message = r"exp_avg_sq of params\[1\] of group 0 to be of dtype float32, float16 or bfloat16"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)
