# SPDX-License-Identifier: BSD-3-Clause
"""Processes with other parameters of one model share norm, clipping and the decision to skip.

What would count twice or come apart is refused; a group of one process costs nothing.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.adam import make_params, random_grads
from support.cases import message_of, run_cases
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.optimizers.distributed import norm_device
from torchfuse.optimizers.options import NormGroups
from torchfuse.parallel import LARC
from torchfuse.testing import OPTIM_SPECS, OptimSpec

pytestmark = pytest.mark.processes

SHAPES = [(8, 5), (3, 6), (9,), (6, 4)]
#: The parameters of each stage of the pipeline.
STAGES = (slice(0, 1), slice(1, 4))
STEPS = 3
#: The step in which a gradient of the last stage is infinite.
INFINITE = 1
CLIPPED: dict[str, Any] = {"max_grad_norm": 0.5}


def gradients(step: int, device: str) -> list[Tensor]:
    grads = random_grads(make_params(SHAPES, torch.float32, device), step)
    if step == INFINITE:
        grads[-1][-1, -1] = math.inf
    return grads


def trained(
    stage: slice,
    step: Callable[[int], None],
    params: list[Tensor],
    optimizer: Any,
    device: str,
    scaler: Any = None,
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> dict[str, Any]:
    """Steps with the gradients of a stage; what became of its parameters, and of the steps."""
    norms, skipped, scales = [], [], []
    for number in range(STEPS):
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones(1, device=device)))
        for param, grad in zip(params, gradients(number, device)[stage], strict=True):
            param.grad = place(grad * scale)
        step(number)
        norms.append(float(optimizer.grad_norm()))
        skipped.append(float(optimizer.last_step_skipped()))
        if scaler is not None:
            scales.append(float(scaler.get_scale()))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    found = {"norms": norms, "skipped": skipped, "scales": scales}
    return {"params": [param.detach().clone() for param in whole], **found}


def train(spec: OptimSpec, position: int, scaled: str, rank: int | None, device: str) -> Any:
    """On one stage of two; rank None: on one process that has both."""
    stage = slice(None) if rank is None else STAGES[rank]
    params = [torch.nn.Parameter(p) for p in make_params(SHAPES, torch.float32, device)[stage]]
    hyper = {**dict(spec.grid[position]), **CLIPPED, "skip_non_finite": scaled == "never"}
    groups = None if rank is None else [dist.group.WORLD]
    optimizer = spec.optimizer(params, **hyper, norm_groups=groups)
    if scaled == "never":
        return trained(stage, lambda _: optimizer.step(), params, optimizer, device)
    scaler = GradScaler(device, init_scale=64.0)

    def step(_: int) -> None:
        if scaled == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return trained(stage, step, params, optimizer, device, scaler)


SCALED = ("never", "inside", "unscaled")
KINDS = {
    f"{spec.algorithm} {scaled}": partial(train, spec, -1, scaled)
    for spec in OPTIM_SPECS
    for scaled in SCALED
}


#: A frozen stage among others that clip or, if not, obey what unscale_() has found.
FROZEN = {"frozen": CLIPPED, "frozen, not clipped": {}}


def train_without_gradients(clipped: dict[str, Any], rank: int, device: str) -> dict[str, Any]:
    """The first stage is frozen, and never has a gradient."""
    params = [torch.nn.Parameter(p) for p in make_params(SHAPES, torch.float32, device)]
    optimizer = FusedAdam(params[STAGES[rank]], **clipped, norm_groups=[dist.group.WORLD])
    scaler = GradScaler(device, init_scale=64.0)

    def step(number: int) -> None:
        if rank == 0:
            optimizer.zero_grad()
        if number == 2 or not clipped:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    found = trained(STAGES[rank], step, params[STAGES[rank]], optimizer, device, scaler)
    return {**found, "states": len(optimizer.state)}


def step_above_a_threshold(rank: int, device: str) -> float:
    """Of two stages whose norm is above it only together."""
    param = torch.nn.Parameter(torch.ones(1, device=device))
    optimizer = FusedAdam([param], skip_norm_above=6.0, norm_groups=[dist.group.WORLD])
    param.grad = torch.full_like(param, 5.0)
    optimizer.step()
    return float(optimizer.last_step_skipped())


def step_in_fake_mode(rank: int, device: str) -> float:
    """Clips with another stage while a dispatch mode would replace every new tensor."""
    params = make_params([(4,)], torch.float32, device)
    optimizer = FusedAdam(params, norm_groups=[dist.group.WORLD], **CLIPPED)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer.step()
    return float(torch.as_tensor(optimizer.grad_norm()))


def train_two_optimizers(rank: int, device: str) -> dict[str, Any]:
    """One scaler for two, of which one shares nothing and sees an overflow on its own."""
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    shared = FusedAdam([params[0]], lr=0.5, norm_groups=[dist.group.WORLD])
    alone = torch.optim.SGD([params[1]], lr=0.5)
    scaler = GradScaler(device, init_scale=64.0)
    scaler.scale(torch.ones(1, device=device))
    for number in range(2):
        params[0].grad = torch.full_like(params[0], math.inf if (rank, number) == (1, 0) else 64.0)
        params[1].grad = torch.full_like(params[1], 64.0)
        for optimizer in (shared, alone):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    return {"scale": scaler.get_scale(), "params": [param.detach() for param in params]}


def train_split(rank: int, device: str) -> dict[str, Any]:
    """Two stages, each on two ranks that have half of every parameter."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp"))
    stage = STAGES[mesh.get_local_rank("pp")]
    start = make_params(SHAPES, torch.float32, device)[stage]

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh["dp"], [Shard(0)])

    params = [torch.nn.Parameter(place(param.detach())) for param in start]
    optimizer = FusedAdam(params, **CLIPPED, skip_non_finite=True, norm_groups=[mesh["pp"]])
    return trained(stage, lambda _: optimizer.step(), params, optimizer, device, place=place)


def copied(rank: int, device: str) -> list[float]:
    """Norms of a copy, and of one that was pickled."""
    params = [torch.nn.Parameter(torch.ones(4, device=device))]
    params[0].grad = torch.full_like(params[0], 1.0 + rank)
    optimizer = FusedAdam(params, **CLIPPED, norm_groups=[dist.group.WORLD])
    norms = []
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.param_groups[0]["params"][0].grad = params[0].grad
        other.step()
        norms.append(float(other.grad_norm()))
    return norms


def refusals(rank: int, device: str) -> list[str]:
    """What each of these raises."""
    world = dist.group.WORLD
    same = dist.new_group([0, 1])
    param = torch.nn.Parameter(torch.ones(4, device=device))
    mesh = init_device_mesh(device, (2,))
    split = torch.nn.Parameter(distribute_tensor(torch.ones(4, device=device), mesh, [Shard(0)]))
    split.grad = torch.ones_like(split)
    of_split = FusedAdam([split], norm_groups=[world])
    shared = FusedAdam([param], norm_groups=[world])
    param.grad = torch.ones_like(param)
    scaler = torch.amp.GradScaler(device)
    scaler.scale(torch.ones(1, device=device))
    found = [
        message_of(lambda: FusedAdam([param], norm_groups=[world, same])),
        message_of(of_split.step),
        message_of(lambda: ZeroRedundancyOptimizer([param], FusedAdam, norm_groups=[world])),
        message_of(lambda: ZeroRedundancyOptimizer([param], FusedAdam, skip_norm_above=1.0)),
        message_of(lambda: scaler.step(shared)),
        message_of(lambda: LARC(shared)),
    ]
    assert bool((param == 1).all())
    return found


REFUSALS = (
    r"FusedAdam: expected norm_groups\[1\] to share only this process with the preceding groups, "
    r"got rank {other} too",
    r"FusedAdam: expected params\[0\] of group 0 to be on no other process of norm_groups, "
    r"got rank {other}, whose",
    r"FusedAdam: expected norm_groups as an argument of the optimizer, got norm_groups in group 0"
    r"\..* In "
    r"ZeroRedundancyOptimizer, pass optimizer_class=functools.partial\(FusedAdam, norm_groups=\[",
    r"FusedAdam: expected norm_groups with skip_norm_above=1.0 in ZeroRedundancyOptimizer, each of",
    r"FusedAdam.step: expected torchfuse.amp.GradScaler with norm_groups, got a scaler that only",
    r"LARC: expected an optimizer without norm_groups, got a FusedAdam with norm",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> dict[str, list[Any]]:
    kinds = {
        **KINDS,
        "threshold": step_above_a_threshold,
        "copied": copied,
        "fake": step_in_fake_mode,
        "two": train_two_optimizers,
        "refusals": refusals,
    }
    for name, clipped in FROZEN.items():
        kinds[name] = partial(train_without_gradients, clipped)
    cases = {name: partial(kind, device=group_device) for name, kind in kinds.items()}
    return run_cases(tmp_path_factory.mktemp("stages"), 2, cases, device=group_device)


@pytest.fixture(scope="module")
def found_by_four(
    tmp_path_factory: pytest.TempPathFactory, group_device: str
) -> dict[str, list[Any]]:
    cases = {"split": partial(train_split, device=group_device)}
    return run_cases(tmp_path_factory.mktemp("four"), 4, cases, device=group_device)


def assert_as_one(found: dict[str, Any], expected: dict[str, Any], stage: slice) -> None:
    torch.testing.assert_close(found["params"], expected["params"][stage], rtol=2e-6, atol=1e-7)
    for key in sorted({"skipped", "scales", "norms"} & set(found)):
        assert found[key] == pytest.approx(expected[key], rel=1e-6, nan_ok=True), key


@pytest.mark.parametrize("name", list(KINDS))
def test_stages_train_as_one_process_with_all_parameters(
    found: dict[str, list[Any]], name: str
) -> None:
    expected = KINDS[name](None, device="cpu")
    assert expected["skipped"] == [0.0, 1.0, 0.0]
    for rank, stage in enumerate(STAGES):
        assert_as_one(found[name][rank], expected, stage)


@pytest.mark.parametrize("name", FROZEN)
def test_a_stage_without_gradients_takes_part(found: dict[str, list[Any]], name: str) -> None:
    first, second = found[name]
    assert second["states"] == 3
    assert first["states"] == 0
    assert first["skipped"] == second["skipped"] == [0.0, 1.0, 0.0]
    assert first["scales"] == second["scales"] == [64.0, 32.0, 32.0]
    if not FROZEN[name]:
        return
    squares = [sum(g.square().sum() for g in gradients(s, "cpu")[STAGES[1]]) for s in (0, 2)]
    for norms in (first["norms"], second["norms"]):
        assert [norms[0], norms[2]] == pytest.approx([float(s.sqrt()) for s in squares], rel=1e-6)
        assert norms[1] == math.inf


def test_all_stages_skip_a_norm_above_the_threshold(found: dict[str, list[Any]]) -> None:
    assert found["threshold"] == [1.0, 1.0]


def test_a_dispatch_mode_does_not_replace_the_norms_memory(found: dict[str, list[Any]]) -> None:
    assert found["fake"] == pytest.approx([math.sqrt(8.0)] * 2)


def test_one_scaler_for_several_optimizers(found: dict[str, list[Any]]) -> None:
    for of_rank in found["two"]:
        assert of_rank["scale"] == 32.0
        shared, alone = of_rank["params"]
        # One step of Adam, and two of SGD whose gradients are 1 and, after the backoff, 2.
        torch.testing.assert_close(shared, torch.full((3,), 0.5))
        torch.testing.assert_close(alone, torch.full((3,), 1.0 - 0.5 - 1.0))


def test_copies_share_too(found: dict[str, list[Any]]) -> None:
    for norms in found["copied"]:
        assert norms == pytest.approx(2 * [math.sqrt(4 * 1.0 + 4 * 4.0)])


def test_stages_whose_parameters_are_sharded(found_by_four: dict[str, list[Any]]) -> None:
    params = [torch.nn.Parameter(p) for p in make_params(SHAPES, torch.float32, "cpu")]
    optimizer = FusedAdam(params, **CLIPPED, skip_non_finite=True)
    expected = trained(slice(None), lambda _: optimizer.step(), params, optimizer, "cpu")
    for rank, actual in enumerate(found_by_four["split"]):
        assert_as_one(actual, expected, STAGES[rank // 2])


def test_what_would_count_twice_or_come_apart_is_refused(found: dict[str, list[Any]]) -> None:
    for rank, messages in enumerate(found["refusals"]):
        for message, expected in zip(messages, REFUSALS, strict=True):
            assert re.match(r"\w+: " + expected.format(other=1 - rank), message), message


# --- One process ---------------------------------------------------------------------------------


def make(norm_groups: Any, param: Tensor | None = None) -> FusedAdam:
    param = torch.nn.Parameter(torch.ones(3)) if param is None else param
    return FusedAdam([param], norm_groups=norm_groups, max_grad_norm=1.0)


NO_LIST = (
    r"norm_groups to be a list of process groups, got ProcessGroup\. Pass groups that this "
    r"process belongs to: \[torch\.distributed\.new_group\(ranks\)\]"
)
NO_GROUP = r"norm_groups\[1\] to be a process group, got .*\. Pass groups"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda world: world, NO_LIST),
        (lambda world: [world, "pp"], NO_GROUP),
        (lambda world: [world, None], NO_GROUP),
        (lambda world: [world, dist.GroupMember.NON_GROUP_MEMBER], NO_GROUP),
    ],
    ids=["no list", "text", "None", "no member"],
)
@pytest.mark.usefixtures("mesh")
def test_what_is_no_list_of_groups_of_this_process_is_refused(groups: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^FusedAdam: expected {message}"):
        make(groups(dist.group.WORLD))


def test_a_mesh_has_one_dimension_and_a_group_of_one_process_is_left_out(mesh: DeviceMesh) -> None:
    two = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    message = (
        r"FusedAdam: expected norm_groups\[0\] to be a process group or a 1-dimensional mesh, got "
        r"2 dimensions\. Select the dimension whose processes have other parameters, such as mesh\["
    )
    with pytest.raises(ValueError, match=message):
        make([two])
    for groups in ([two["pp"]], [dist.group.WORLD, dist.group.WORLD]):
        assert make(groups).norm_groups.names == ()


@pytest.mark.usefixtures("mesh")
def test_a_group_that_was_destroyed_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = make(None, param)
    optimizer.norm_groups = NormGroups(("gone",))  # what a pickle of another program brings
    param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="expected group to name a process group that exists"):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))


@pytest.mark.usefixtures("mesh")
def test_a_process_without_parameters_takes_part_where_others_may_be() -> None:
    optimizer = FusedAdam([{"params": []}], norm_groups=[dist.group.WORLD])
    assert norm_device(optimizer, optimizer.norm_groups) == torch.device("cpu")
