# SPDX-License-Identifier: BSD-3-Clause
"""Masters and remainders when a program writes to the 16-bit parameters between steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor

from torchfuse.optimizers import FusedAdam
from torchfuse.optimizers.state import master_of

MASTERS: dict[str, Any] = {"master_weights": True}
REMAINDERS: dict[str, Any] = {**MASTERS, "store_param_remainders": True}
every_mode = pytest.mark.parametrize(
    ("options", "dtype"),
    [(MASTERS, torch.bfloat16), (MASTERS, torch.float16), (REMAINDERS, torch.bfloat16)],
    ids=["bf16-master", "fp16-master", "remainder"],
)


def _trained(
    options: dict[str, Any], dtype: torch.dtype, lr: float = 1e-3
) -> tuple[torch.nn.Parameter, FusedAdam]:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(200).to(dtype))
    optimizer = FusedAdam([p], lr=lr, **options)
    for _ in range(5):
        _step(p, optimizer)
    return p, optimizer


def _step(p: torch.nn.Parameter, optimizer: FusedAdam, lr: float | None = None) -> None:
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    p.grad = torch.randn_like(p)
    optimizer.step()


def _master(p: torch.nn.Parameter, optimizer: FusedAdam) -> Tensor:
    master = master_of(p, optimizer.state[p])
    return master.clone()


@every_mode
def test_a_write_lasts(options: dict[str, Any], dtype: torch.dtype) -> None:
    p, optimizer = _trained(options, dtype)
    before = _master(p, optimizer)
    with torch.no_grad():
        p.clamp_(-0.5, 0.5)
    clamped = p.detach().clone()
    _step(p, optimizer, lr=0.0)
    assert_same_bits(p.detach(), clamped, "parameter")
    master = _master(p, optimizer)
    assert_same_bits(master.to(dtype), clamped, "rounded master")
    untouched = before.to(dtype) == clamped
    assert 0 < int(untouched.sum()) < 200
    assert_same_bits(master[untouched], before[untouched], "masters of untouched elements")


@every_mode
def test_a_write_of_the_same_values_loses_nothing(options: Any, dtype: torch.dtype) -> None:
    """Gathers, swaps and loading write what is there already."""
    p, optimizer = _trained(options, dtype)
    before = _master(p, optimizer)
    assert bool((before != p.float()).any())
    with torch.no_grad():
        p.copy_(p.clone())
        p.data = p.data.clone()
    _step(p, optimizer, lr=0.0)
    assert_same_bits(_master(p, optimizer), before, "master")


@pytest.mark.parametrize("model_first", [False, True])
@every_mode
def test_checkpoints_load_in_either_order(
    options: dict[str, Any], dtype: torch.dtype, model_first: bool
) -> None:
    p, optimizer = _trained(options, dtype)
    weights, saved = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(1)
    for _ in range(3):
        _step(p, optimizer)
    q, other = _trained(options, dtype, lr=0.5)

    def load_model() -> None:
        with torch.no_grad():
            q.copy_(weights)

    for load in [load_model, lambda: other.load_state_dict(saved)][:: 1 if model_first else -1]:
        load()
    torch.manual_seed(1)
    for _ in range(3):
        _step(q, other)
    assert_same_bits(q.detach(), p.detach(), "parameter after resuming")
    assert_same_bits(_master(q, other), _master(p, optimizer), "master after resuming")


def test_a_write_through_data_needs_a_call() -> None:
    p, optimizer = _trained(MASTERS, torch.bfloat16)
    p.data[:100].fill_(2.0)
    kept = _master(p, optimizer)[100:]
    optimizer.remake_masters([p])
    assert_same_bits(_master(p, optimizer)[:100], torch.full((100,), 2.0), "written")
    assert_same_bits(_master(p, optimizer)[100:], kept, "the others")
    _step(p, optimizer, lr=0.0)
    assert_same_bits(p.detach()[:100], torch.full((100,), 2.0, dtype=torch.bfloat16), "parameter")


def test_remake_masters_leaves_a_master_of_none_out_and_refuses_strangers() -> None:
    p, optimizer = _trained(MASTERS, torch.bfloat16)
    optimizer.state[p]["master_param"] = None
    optimizer.remake_masters()
    assert optimizer.state[p]["master_param"] is None
    message = r"FusedAdam\.remake_masters: expected params\[0\] to be a parameter of the optimizer"
    with pytest.raises(ValueError, match=message):
        optimizer.remake_masters([torch.ones(3)])


def test_parameters_of_one_buffer_share_a_version() -> None:
    """A step moves the version that views share once for each; none of that is a write."""
    flat = torch.randn(64).bfloat16()
    params = [torch.nn.Parameter(part) for part in flat.split(16)]
    optimizer = FusedAdam(params, **MASTERS)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    kept = optimizer.state[params[0]]["master_param"]
    kept.fill_(7.0)  # A master that its parameter knows nothing of lasts until the parameter moves.
    params[1].grad = None
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_same_bits(kept, torch.full_like(kept, 7.0), "master")


@pytest.mark.parametrize("module_half", [False, True], ids=["data", "module"])
def test_an_fp32_run_goes_on_in_16_bits_with_all_its_bits(module_half: bool) -> None:
    """The recipe of docs/checkpoints.md: masters are set before the parameters are rounded."""
    p, whole = _trained({}, torch.float32)
    module = torch.nn.Module()
    module.q = torch.nn.Parameter(p.detach().clone())
    resumed = FusedAdam(module.parameters(), lr=1e-3, master_weights=True)
    resumed.load_state_dict(whole.state_dict())
    resumed.state[module.q]["master_param"] = module.q.detach().clone()
    if module_half:
        module.bfloat16()
    else:
        module.q.data = module.q.data.bfloat16()
    for _ in range(3):
        grad = torch.randn(200).bfloat16()
        p.grad, module.q.grad = grad.float(), grad
        whole.step()
        resumed.step()
        assert_same_bits(_master(module.q, resumed), p.detach(), "master")
        assert_same_bits(module.q.detach(), p.detach().bfloat16(), "parameter")


@every_mode
def test_swapped_parameters_stay_swapped(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Stepped equally often, both have one version: it does not tell them apart."""
    params = [torch.nn.Parameter(torch.full((8,), value).to(dtype)) for value in (1.0, 5.0)]
    optimizer = FusedAdam(params, lr=0.0, **options)
    for _ in range(2):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    torch.utils.swap_tensors(params[0], params[1])
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert [p[0].item() for p in params] == [5.0, 1.0]


@every_mode
def test_other_data_at_the_same_address_lasts(options: dict[str, Any], dtype: torch.dtype) -> None:
    """As an allocator gives it to the second of two replacements: no version, no address moves."""
    memory = bytearray(400)
    p, optimizer = _trained(options, dtype)
    p.data = torch.frombuffer(memory, dtype=dtype).copy_(p.detach())
    _step(p, optimizer)
    address, version = p.data_ptr(), p._version
    p.data = p.data.clone()
    p.data = torch.frombuffer(memory, dtype=dtype).fill_(0.5)
    assert (p.data_ptr(), p._version) == (address, version)
    _step(p, optimizer, lr=0.0)
    assert_same_bits(p.detach(), torch.full_like(p, 0.5), "parameter")


def test_a_conversion_that_fails_loses_no_master() -> None:
    p, optimizer = _trained(REMAINDERS, torch.bfloat16)
    remainder = optimizer.state[p]["param_remainder"]
    p.grad = None
    p.data = p.data.half()
    optimizer.param_groups[0]["store_param_remainders"] = False
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"expected param to be of dtype bfloat16"):
            optimizer.step()
    assert optimizer.state[p]["param_remainder"] is remainder


@every_mode
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_model_that_becomes_wide_takes_its_masters(
    wide: torch.dtype, options: dict[str, Any], dtype: torch.dtype
) -> None:
    p, optimizer = _trained(options, dtype)
    expected = _master(p, optimizer).to(wide)
    p.data = p.data.to(wide)
    p.data[0] = expected[0] = 7.001
    for state in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][state] = optimizer.state[p][state].to(wide)
    optimizer.param_groups[0]["store_param_remainders"] = False
    _step(p, optimizer, lr=0.0)
    assert_same_bits(p.detach(), expected, "p")
    assert not {"master_param", "param_remainder"} & set(optimizer.state[p])


@every_mode
def test_masters_that_are_switched_off_are_dropped(options: Any, dtype: torch.dtype) -> None:
    p, optimizer = _trained(options, dtype)
    optimizer.param_groups[0].update(store_param_remainders=False, master_weights=False)
    _step(p, optimizer)
    assert not {"master_param", "param_remainder"} & set(optimizer.state[p])
    optimizer.master_weights = True
    _step(p, optimizer, lr=0.0)
    assert_same_bits(_master(p, optimizer), p.detach().float(), "master")


@pytest.mark.parametrize("how", ["loaded", "copied"])
def test_masters_that_are_switched_off_are_dropped_from_copies(how: str) -> None:
    p, optimizer = _trained({"master_weights": True}, torch.bfloat16)
    optimizer.param_groups[0]["master_weights"] = False
    other, copied = copy.deepcopy((p, optimizer))
    if how == "loaded":
        copied = FusedAdam([other])
        copied.load_state_dict(optimizer.state_dict())
    for param, model in ((p, optimizer), (other, copied)):
        torch.manual_seed(1)
        _step(param, model)
    assert_same_bits(other.detach(), p.detach(), "parameter")


@every_mode
def test_a_master_of_a_widened_parameter_is_loaded(options: Any, dtype: torch.dtype) -> None:
    p, optimizer = _trained(options, dtype)
    expected = _master(p, optimizer)
    p.data = p.data.float()
    optimizer.param_groups[0]["store_param_remainders"] = False
    optimizer.load_state_dict(optimizer.state_dict())
    _step(p, optimizer, lr=0.0)
    assert_same_bits(p.detach(), expected, "p")


def test_masters_are_dropped_after_a_step_that_failed() -> None:
    params = [torch.nn.Parameter(torch.ones(3).bfloat16()) for _ in range(2)]
    groups = [{"params": [param], "master_weights": True} for param in params]
    optimizer = FusedAdam(groups, lr=1e-3)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[1]["master_weights"] = False
    step, optimizer.state[params[0]]["step"] = optimizer.state[params[0]]["step"], "damaged"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.state[params[0]]["step"] = step
    optimizer.step()
    assert "master_param" not in optimizer.state[params[1]]
