# SPDX-License-Identifier: BSD-3-Clause
"""Calls that raise the errors which docs/troubleshooting.md quotes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parametrize

import torchfuse.apex
from torchfuse import _loader, ops
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    revert_syncbn_model,
)


def param(**options: object) -> torch.Tensor:
    return torch.ones(4, 3, **options).requires_grad_()  # type: ignore[call-overload]


def stepped() -> tuple[torch.Tensor, FusedAdam]:
    weight = param()
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam([weight])
    optimizer.step()
    return weight, optimizer


def build_info_is_missing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_loader, "_BUILD_INFO", Path("nowhere") / "build_info.json")
        _loader.recorded_build.__wrapped__()


def sparse_gradient() -> None:
    weight = param()
    weight.grad = torch.ones(4, 3).to_sparse()
    FusedAdam([weight]).step()


def state_of_another_shape() -> None:
    weight, optimizer = stepped()
    optimizer.state[weight]["exp_avg"] = torch.zeros(3, 4)
    optimizer.step()


def storage_too_small() -> None:
    weight, optimizer = stepped()
    weight.untyped_storage().resize_(4)
    optimizer.step()


def gradient_that_overlaps() -> None:
    weight = param()
    weight.grad = torch.ones(1).expand(4, 3)
    FusedAdam([weight], write_back_grads=True, max_grad_norm=1.0).step()


def step_within_a_step() -> None:
    class Rate:
        def __float__(self) -> float:
            try:
                optimizer.step()
            except RuntimeError as error:
                errors.append(error)
            return 0.0

    errors: list[RuntimeError] = []
    _, optimizer = stepped()
    optimizer.param_groups[0]["lr"] = Rate()
    optimizer.step()
    raise errors[0]


def state_on_another_device() -> None:
    weight, optimizer = stepped()
    optimizer.state[weight]["exp_avg"] = torch.zeros(4, 3, device="meta")
    optimizer.step()


def op_on_a_leaf() -> None:
    state = [torch.zeros(4, 3)]
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    step = [torch.zeros(())]
    ops.fused_adam_(
        [param()], [torch.ones(4, 3)], state, [torch.zeros(4, 3)], [], step, [], **rates
    )


def scaled() -> tuple[FusedAdam, GradScaler]:
    weight = param()
    optimizer, scaler = FusedAdam([weight]), GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    return optimizer, scaler


def step_twice() -> None:
    optimizer, scaler = scaled()
    scaler.step(optimizer)
    scaler.step(optimizer)


def unscale_twice() -> None:
    optimizer, scaler = scaled()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_fp16() -> None:
    scaler = scaled()[1]
    weight = param(dtype=torch.float16)
    weight.grad = torch.ones_like(weight)
    scaler.unscale_(FusedAdam([weight]))


def closure_under_a_scaler() -> None:
    optimizer, scaler = scaled()
    scaler.step(optimizer, lambda: 1.0)


def load_scaler() -> None:
    GradScaler("cpu").load_state_dict({"scale": 1.0})


def part_of_apex_that_is_not_there() -> None:
    torchfuse.apex.install()
    try:
        importlib.import_module("apex.mlp")
    finally:
        torchfuse.apex.uninstall()


def sparse_gradient_under_larc() -> None:
    weight = param()
    weight.grad = torch.ones(4, 3).to_sparse()
    LARC(torch.optim.SGD([weight], lr=0.1)).step()


def in_a_group(provocation: Callable[[], object]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        provocation()
    finally:
        dist.destroy_process_group()


class Branches(torch.nn.ModuleList):
    """Two layers, of which it calls one."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self[0](value)
        return output


def unused_parameter() -> None:
    model = DistributedDataParallel(Branches([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def sparse_gradient_reduced() -> None:
    weight = param()
    weight.grad = torch.ones(4, 3).to_sparse()
    Reducer([weight.grad]).reduce()


def clipped(value: float = 1.0, **options: Any) -> None:
    weight = param()
    weight.grad = torch.full((4, 3), value)
    torchfuse.clip_grad_norm_([weight], **{"max_norm": 1.0, **options})


def sparse_gradient_clipped() -> None:
    weight = param()
    weight.grad = torch.ones(4, 3).to_sparse()
    torchfuse.clip_grad_norm_([weight], 1.0)


def group_that_was_destroyed() -> None:
    layers: list[SyncBatchNorm] = []
    in_a_group(lambda: layers.append(SyncBatchNorm(3, process_group=dist.group.WORLD)))
    layers[0](torch.ones(2, 3))


def normalized(*sizes: int, z: torch.Tensor | None = None, **options: Any) -> None:
    SyncBatchNorm(3)(torch.ones(sizes, **options), z)


def parameter_of_another_size() -> None:
    layer = SyncBatchNorm(3)
    layer.weight = torch.nn.Parameter(torch.ones(4))
    layer(torch.ones(2, 3))


def elemt(vector: torch.Tensor | None, packed: torch.Tensor | None) -> None:
    torch.ops.torchfuse.batch_norm_elemt(
        torch.ones(2, 3), vector, None, packed, None, None, None, None, momentum=0.1, eps=1e-5
    )


def output_without_relu() -> None:
    x = torch.ones(2, 3)
    saved = torch.ones(7, dtype=torch.float64)
    torch.ops.torchfuse.batch_norm_backward_reduce(x, x, saved, None, None, x, relu=False)


def parametrized_layer_reverted() -> None:
    model = convert_syncbn_model(torch.nn.Sequential(torch.nn.BatchNorm2d(3)))
    parametrize.register_parametrization(model.get_submodule("0"), "weight", torch.nn.Identity())
    revert_syncbn_model(model)


PROVOCATIONS: list[Callable[[], object]] = [
    build_info_is_missing,
    sparse_gradient,
    state_of_another_shape,
    storage_too_small,
    gradient_that_overlaps,
    step_within_a_step,
    op_on_a_leaf,
    step_twice,
    unscale_twice,
    unscale_fp16,
    closure_under_a_scaler,
    load_scaler,
    part_of_apex_that_is_not_there,
    sparse_gradient_under_larc,
    sparse_gradient_clipped,
    lambda: clipped(float("inf"), error_if_nonfinite=True),
    lambda: clipped(max_norm=-1.0),
    lambda: clipped(norm_type=float("nan")),
    lambda: torchfuse.clip_grad_norm_({"weight": param()}, 1.0),  # type: ignore[dict-item]
    lambda: torchfuse.clip_grad_value_([], -1.0),
    lambda: torchfuse.clip_grads_with_norm_([], 1.0, torch.ones(2)),
    lambda: _loader.check_torch("1.0.0"),
    lambda: DistributedDataParallel(torch.nn.Linear(2, 1)),
    lambda: in_a_group(lambda: DistributedDataParallel(torch.nn.Linear(2, 1, device="meta"))),
    lambda: in_a_group(lambda: DistributedDataParallel(torch.nn.Linear(2, 1), shared_param=True)),
    lambda: in_a_group(unused_parameter),
    lambda: in_a_group(sparse_gradient_reduced),
    lambda: normalized(3),
    lambda: normalized(2, 4),
    lambda: normalized(1, 3),
    lambda: normalized(2, 3, dtype=torch.int64),
    lambda: normalized(2, 3, z=torch.ones(2, 1)),
    lambda: normalized(2, 3, z=torch.ones(2, 3, dtype=torch.float16)),
    lambda: SyncBatchNorm(3, device="meta")(torch.ones(2, 3)),
    lambda: torch.func.vmap(SyncBatchNorm(3))(torch.ones(2, 4, 3)),
    group_that_was_destroyed,
    lambda: in_a_group(lambda: create_syncbn_process_group(2)),
    lambda: revert_syncbn_model(
        convert_syncbn_model(torch.nn.Sequential(torch.nn.BatchNorm2d(3)), channel_last=True)
    ),
    parametrized_layer_reverted,
    parameter_of_another_size,
    lambda: torch.ops.torchfuse.sync_batch_norm(
        torch.ones(2, 0), None, None, None, None, None, training=True, momentum=0.1, eps=1e-5
    ),
    lambda: torch.ops.torchfuse.batch_norm_stats(torch.ones(3)),
    lambda: elemt(torch.ones(2), torch.ones(13, dtype=torch.float64)),
    lambda: elemt(None, torch.ones(13)),
    lambda: elemt(None, None),
    output_without_relu,
    lambda: GradScaler("cpu").unscale_(FusedAdam([param()])),
    lambda: scaled()[1].update(),
    lambda: scaled()[1].update(0.0),
    lambda: scaled()[1].scale({"loss": torch.ones(())}),
    lambda: GradScaler("cpu", min_scale=2.0, max_scale=1.0),
    lambda: GradScaler("cpu", init_scale=2.0**127),
]
