# SPDX-License-Identifier: BSD-3-Clause
"""What a step reads of DTensors in each process: local tensors, and how gradients are placed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torchfuse.optimizers import FusedAdam, FusedLAMB


def _whole(tensor: DTensor | Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    whole: Tensor = tensor.detach().full_tensor()
    return whole.clone()


def _param(mesh: DeviceMesh) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))


def test_gradient_in_another_placement_is_refused(mesh: DeviceMesh) -> None:
    param = _param(mesh)
    optimizer = FusedLAMB([param])
    param.grad = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
    before = _whole(param)
    message = (
        r"expected grad of params\[0\] of group 0 to be placed like its parameter, .*got .*Repl"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(_whole(param), before)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert not torch.equal(_whole(param), before)


def test_gradient_in_another_placement_is_refused_after_gradients_like_the_parameter(
    mesh: DeviceMesh,
) -> None:
    """What placed a gradient is remembered, for that gradient's placement alone."""
    param = _param(mesh)
    optimizer = FusedAdam([param])
    for _ in range(3):
        param.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        optimizer.step()
    before = _whole(param)
    for other in (Shard(1), Replicate()):
        param.grad = distribute_tensor(torch.ones(4, 2), mesh, [other])
        with pytest.raises(ValueError, match=r"params\[0\] of group 0 to be placed like its"):
            optimizer.step()
    assert torch.equal(_whole(param), before)


def test_gradient_on_another_mesh_is_refused(mesh: DeviceMesh) -> None:
    param = _param(mesh)
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    param.grad = distribute_tensor(torch.ones(4, 2), other, [Shard(0)])
    with pytest.raises(ValueError, match=r"params\[0\] of group 0 to be placed like its parameter"):
        FusedAdam([param]).step()


def test_partial_parameter_is_refused(mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    message = r"params\[0\] of group 0 to be sharded or replicated, got"
    with pytest.raises(ValueError, match=message):
        FusedAdam([torch.nn.Parameter(partial)])


def test_replaced_local_tensor_is_the_one_that_is_updated(mesh: DeviceMesh) -> None:
    param = _param(mesh)
    optimizer = FusedAdam([param], lr=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    other = torch.full((4, 2), 3.0)
    param.data = DTensor.from_local(other, mesh, [Shard(0)])
    optimizer.step()
    assert not torch.equal(_whole(param), torch.full((4, 2), 3.0))
    assert torch.equal(_whole(param), param.to_local().detach())


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


def test_remainders_go_through_a_full_state_dict(mesh: DeviceMesh) -> None:
    """Backends send no int16."""
    trained, resumed = (nn.Linear(4, 2).bfloat16() for _ in range(2))
    optimizers = []
    for model in (trained, resumed):
        fully_shard(model, mesh=mesh)
        options = {"master_weights": True, "store_param_remainders": True}
        optimizers.append(FusedAdam(model.parameters(), lr=0.1, **options))
    for _ in range(2):
        optimizers[0].zero_grad()
        trained(torch.randn(3, 4, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizers[0].step()
    full = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(trained, optimizers[0], options=full)
    set_optimizer_state_dict(resumed, optimizers[1], saved, options=full)
    for param, other in zip(trained.parameters(), resumed.parameters(), strict=True):
        remainder = optimizers[1].state[other]["param_remainder"]
        assert remainder.dtype == torch.int16
        expected = optimizers[0].state[param]["param_remainder"]
        assert torch.equal(remainder.full_tensor(), expected.full_tensor())
