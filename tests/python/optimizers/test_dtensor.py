# SPDX-License-Identifier: BSD-3-Clause
"""DTensor parameters: each process updates its own part, and norms are those of the whole tensors.

Four processes on a mesh of 2 x 2 run all cases once, and with all combinations eight on 2 x 4. The
tests compare what they found with the same training on whole tensors in one process. What one
process shows comes behind.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads
from support.cases import run_cases
from support.compare import assert_same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torchfuse import _C
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedMuon, FusedOptimizer
from torchfuse.optimizers.state import REMAINDER, master_of
from torchfuse.testing import OPTIM_SPECS, OptimSpec

pytestmark = pytest.mark.processes

RANKS = 4
#: Beside these, in a run of all combinations.
MOST_RANKS = 8
SHAPES = [(8, 5), (3, 6), (1, 4), (9,), (0, 2), (7,), (6, 4), (5, 3), (4, 7)]
# Unevenly, with nothing at all on some processes, over one dimension of the mesh and over both, and
# on meshes of their own.
PLACEMENTS: list[Any] = [
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Replicate()],
    None,
    [Replicate(), Replicate()],
    ("outer", [Shard(0)]),
    ("inner", [Shard(1)]),
]
REMAINDERS: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}
STORED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16-master": (torch.bfloat16, {"master_weights": True}),
    "bf16-remainder": (torch.bfloat16, REMAINDERS),
    "fp32-ema": (torch.float32, {"ema_decay": 0.5}),
    "bf16-remainder-ema": (torch.bfloat16, {**REMAINDERS, "ema_decay": 0.5}),
}
CASES = {
    f"{spec.algorithm}-{position}-{stored}": (spec, dict(spec.grid[position]), stored)
    for spec in OPTIM_SPECS
    for position in (0, 1, -1)
    # NovoGrad's second has norms of another type.
    if position != 1 or spec.algorithm == "novograd"
    for stored in STORED
}


def _place(tensor: Tensor, index: int, mesh: DeviceMesh | None) -> Tensor:
    placements = PLACEMENTS[index]
    if mesh is None or placements is None:
        return tensor.clone()
    if isinstance(placements, tuple):
        dimension, placements = placements
        mesh = mesh[dimension]
    return distribute_tensor(tensor, mesh, placements)


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    # Neither backend gathers 16-bit integers.
    wide = tensor.detach().to(torch.int32) if tensor.dtype == torch.int16 else tensor.detach()
    whole: Tensor = wide.full_tensor()
    return whole.to(tensor.dtype, copy=True)


def _train(
    spec: OptimSpec,
    hyper: dict[str, Any],
    stored: str,
    mesh: DeviceMesh | None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Three steps: the second has one infinite element, which lies in one process's part."""
    dtype, options = STORED[stored]
    start = make_params(SHAPES, dtype, device)
    params = [torch.nn.Parameter(_place(p.detach(), i, mesh)) for i, p in enumerate(start)]
    options = {**hyper, **options, "max_grad_norm": 0.5, "skip_non_finite": True}
    optimizer: FusedOptimizer = spec.optimizer(params, **options)
    norms, skipped = [], []
    for step in range(3):
        grads = random_grads(start, step)
        if step == 1:
            grads[0][-1, -1] = math.inf
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.grad = _place(grad, i, mesh)
        optimizer.step()
        norm, skip = optimizer.grad_norm(), optimizer.last_step_skipped()
        norms.append(norm.item())
        skipped.append(skip.item())
    states = [optimizer.state[param] for param in params]
    return {
        "params": [_whole(param) for param in params],
        "states": [{key: _whole(value) for key, value in state.items()} for state in states],
        "kinds": [{key: type(value).__name__ for key, value in s.items()} for s in states],
        "norms": norms,
        "skipped": skipped,
    }


def _round_at_random(mesh: DeviceMesh | None, device: str = "cpu") -> list[Tensor]:
    """The parameters after three steps without a norm, whose last bit would decide."""
    start = make_params(SHAPES, torch.bfloat16, device)
    params = [torch.nn.Parameter(_place(p.detach(), i, mesh)) for i, p in enumerate(start)]
    optimizer = FusedAdam(params, lr=1e-3, stochastic_rounding=True, seed=7)
    for step in range(3):
        for i, (param, grad) in enumerate(zip(params, random_grads(start, step), strict=True)):
            param.grad = _place(grad, i, mesh)
        optimizer.step()
    return [_whole(param) for param in params]


def _find(device: str, ranks: int, _rank: int) -> dict[str, Any]:
    mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("outer", "inner"))
    found: dict[str, Any] = {name: _train(*case, mesh, device) for name, case in CASES.items()}
    return {**found, "at random": _round_at_random(mesh, device)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "found" in metafunc.fixturenames:
        every = metafunc.config.getoption("--combinations") == "all"
        ranks = [RANKS, MOST_RANKS] if every else [RANKS]
        metafunc.parametrize("found", ranks, indirect=True, scope="module")


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, group_device: str
) -> list[dict[str, Any]]:
    """What each process found."""
    ranks: int = request.param
    cases = {"all": partial(_find, group_device, ranks)}
    return run_cases(tmp_path_factory.mktemp("dtensor"), ranks, cases, device=group_device)["all"]


def _values(result: dict[str, Any]) -> list[Tensor]:
    """The parameters in full precision."""
    masters = (master_of(p, s) for p, s in zip(result["params"], result["states"], strict=True))
    return [p if m is None else m for p, m in zip(result["params"], masters, strict=True)]


def _assert_all_close(actual: list[Tensor], expected: list[Tensor], rtol: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_parts_train_clip_and_skip_as_the_whole(found: list[dict[str, Any]], name: str) -> None:
    expected = _train(*CASES[name], None)
    for result in (ranked[name] for ranked in found):
        _assert_all_close(_values(result), _values(expected))
        # At a boundary between two bf16 values, the last bit of a norm decides.
        _assert_all_close(
            result["params"], expected["params"], rtol=2e-6 if "fp32" in name else 8e-3
        )
        for actual, whole in zip(result["states"], expected["states"], strict=True):
            assert actual.keys() == whole.keys()
            names = sorted(actual.keys() - {REMAINDER})
            _assert_all_close([actual[key] for key in names], [whole[key] for key in names])
        assert result["skipped"] == expected["skipped"] == [0.0, 1.0, 0.0]
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    numbers = {"step", *_C.FusedStep(CASES[name][0].algorithm).tensor_state_names}
    for kinds, placements in zip(found[0][name]["kinds"], PLACEMENTS, strict=True):
        for key, kind in kinds.items():
            assert kind == ("DTensor" if placements and key not in numbers else "Tensor"), key


def test_parts_are_rounded_at_random_as_the_whole(found: list[dict[str, Any]]) -> None:
    expected = _round_at_random(None)
    for result in found:
        for index, (part, whole) in enumerate(zip(result["at random"], expected, strict=True)):
            assert_same_bits(part, whole, f"params[{index}]")


# --- One process ---------------------------------------------------------------------------------


def _param(mesh: DeviceMesh) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))


def test_step_bumps_the_version_and_leaves_no_gradient_behind(mesh: DeviceMesh) -> None:
    param = _param(mesh)
    optimizer = FusedAdam([param], write_back_grads=True, max_grad_norm=1.0)
    param.grad = torch.ones_like(param)
    versions = param._version, param.grad._version
    optimizer.step()
    assert (param._version, param.grad._version) == (versions[0] + 1, versions[1] + 1)
    with torch.no_grad():
        assert param.to_local().grad is None


def test_scaler_step_without_and_with_unscale(mesh: DeviceMesh) -> None:
    for unscales in (False, True):
        param = _param(mesh)
        optimizer = FusedAdam([param], lr=0.5)
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for value, scale in ((8.0, 4.0), (math.inf, 2.0)):
            param.grad = distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)])
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            torch.testing.assert_close(_whole(param), torch.full((4, 2), 0.5))
            assert scaler.get_scale() == scale


@pytest.mark.parametrize("remainders", [False, True])
def test_masters_follow_writes_to_the_dtensor(mesh: DeviceMesh, remainders: bool) -> None:
    """A write to a DTensor moves its own version and not that of its local tensor."""
    values = distribute_tensor(torch.ones(4, 2, dtype=torch.bfloat16), mesh, [Shard(0)])
    param = torch.nn.Parameter(values)
    optimizer = FusedAdam([param], lr=0.0, master_weights=True, store_param_remainders=remainders)
    writes = [
        lambda: param.fill_(3.0),
        lambda: param.copy_(torch.full_like(param, 5.0)),
        lambda: param.to_local().fill_(7.0),
        lambda: param.clamp_(-1.0, 1.0),
    ]
    for value, write in zip((3.0, 5.0, 7.0, 1.0), writes, strict=True):
        param.grad = torch.zeros_like(param)
        optimizer.step()
        with torch.no_grad():
            write()
        optimizer.step()
        assert_same_bits(_whole(param).float(), torch.full((4, 2), value), "parameter")


def test_replaced_local_tensor_is_the_one_that_is_updated(mesh: DeviceMesh) -> None:
    param = _param(mesh)
    optimizer = FusedAdam([param], lr=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = DTensor.from_local(torch.full((4, 2), 3.0), mesh, [Shard(0)])
    optimizer.step()
    assert not torch.equal(_whole(param), torch.full((4, 2), 3.0))
    assert torch.equal(_whole(param), param.to_local().detach())


def test_remainders_go_through_a_full_state_dict(mesh: DeviceMesh) -> None:
    """Backends send no int16."""
    models = trained, resumed = [nn.Linear(4, 2).bfloat16() for _ in range(2)]
    for model in models:
        fully_shard(model, mesh=mesh)
    first, second = (FusedAdam(model.parameters(), lr=0.1, **REMAINDERS) for model in models)
    for _ in range(2):
        first.zero_grad()
        trained(torch.randn(3, 4, dtype=torch.bfloat16)).float().square().sum().backward()
        first.step()
    full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(trained, first, options=full)
    set_optimizer_state_dict(resumed, second, saved, options=full)
    for param, other in zip(trained.parameters(), resumed.parameters(), strict=True):
        remainder = second.state[other][REMAINDER]
        assert remainder.dtype == torch.int16
        assert torch.equal(remainder.full_tensor(), first.state[param][REMAINDER].full_tensor())


@pytest.mark.parametrize(
    ("kind", "option"), [(FusedAdam, "exp_avg_dtype"), (FusedMuon, "ns_dtype")]
)
def test_options_with_a_dtype_go_through_a_full_state_dict(
    mesh: DeviceMesh, kind: Any, option: str
) -> None:
    """torch.distributed.checkpoint gathers no dtype."""
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=mesh)
    optimizer = kind(model.parameters(), **{option: torch.bfloat16})
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=full)
    set_optimizer_state_dict(model, optimizer, saved, options=full)
    assert optimizer.param_groups[0][option] == torch.bfloat16
    optimizer.step()


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_gradient_in_another_placement_is_refused(
    mesh: DeviceMesh, steps: int, kind: Any
) -> None:
    """What placed a gradient is remembered, for that gradient's placement alone."""
    param = _param(mesh)
    optimizer = kind([param])
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    before = _whole(param)
    other_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    for on, placement in ((mesh, Shard(1)), (mesh, Replicate()), (other_mesh, Shard(0))):
        param.grad = distribute_tensor(torch.ones(4, 2), on, [placement])
        message = r"expected grad of params\[0\] of group 0 to be placed like its parameter, .*got"
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert torch.equal(_whole(param), before)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert not torch.equal(_whole(param), before)


def test_partial_parameter_is_refused(mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    message = r"params\[0\] of group 0 to be sharded or replicated, got"
    with pytest.raises(ValueError, match=message):
        FusedAdam([torch.nn.Parameter(partial)])


def test_checkpoint_of_whole_tensors_is_refused_by_name(mesh: DeviceMesh) -> None:
    whole = torch.nn.Parameter(torch.ones(4, 2))
    saved = FusedAdam([whole])
    whole.grad = torch.ones(4, 2)
    saved.step()
    optimizer = FusedAdam([_param(mesh)])
    message = r"state\[0\]\['exp_avg'\] to be a DTensor like its parameter, got Tensor"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state


def test_a_dtensor_as_state_of_a_plain_parameter_is_refused(mesh: DeviceMesh) -> None:
    param = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = FusedAdam([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"exp_avg of params\[0\] of group 0 to be a plain tensor"):
        optimizer.step()


@pytest.mark.parametrize("which", ["param", "grad", "state"])
@pytest.mark.parametrize("value", [5, None, Tensor])
def test_a_local_part_that_is_no_tensor_is_refused(
    mesh: DeviceMesh, which: str, value: object
) -> None:
    param = _param(mesh)
    optimizer = FusedAdam([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    broken = {"param": param, "grad": param.grad, "state": optimizer.state[param]["exp_avg"]}
    setattr(broken[which], "_local_tensor", value)  # noqa: B010  # mypy knows its type
    # torch 2.15 looks into parameters first, where the step asks it for fake tensors.
    message = r"expected (the local part of a .* to be a tensor|Tensor or CustomClassBase), got"
    with pytest.raises((TypeError, AssertionError), match=message):
        optimizer.step()
