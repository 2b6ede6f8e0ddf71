# SPDX-License-Identifier: BSD-3-Clause
"""Converts `nn.BatchNorm*` to `SyncBatchNorm` and back, and creates process groups for it."""

from __future__ import annotations

import warnings

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from torchfuse.parallel.sync_batch_norm import SyncBatchNorm

# Attributes that contain hooks or describe how torch calls each hook.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)
_SETTINGS = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training")
_ORIGIN = "_converted_from"


class _BatchNormOfAnyDimension(_BatchNorm):
    """Batch normalization for a reverted layer that was created as `SyncBatchNorm`."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def convert_syncbn_model(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    channel_last: bool = False,
    *,
    own_communicator: bool = False,
    deterministic: bool = False,
) -> nn.Module:
    """Replaces a model's batch normalization layers with `SyncBatchNorm`.

    The new layers contain the same parameter, buffer and hook objects, so existing optimizers stay
    valid. Training mode, dtype, device and `requires_grad` are kept. A layer that occurs twice is
    replaced with the same new layer in both places. `revert_syncbn_model` undoes the conversion.

    Instance normalization is not changed. Some layers are left unchanged with a warning: subclasses
    with a custom `forward` (for example with an activation), layers that contain modules (for
    example a parametrization), and lazy layers before the first batch.

    Args:
        module (torch.nn.Module): Model to change in place, or a batch normalization layer.
        process_group (torch.distributed.ProcessGroup | None, default None): Processes that share
            statistics. None means the default group; for a `torch.nn.SyncBatchNorm` layer, None
            means the layer's group.
        channel_last (bool, default False): Inputs are ``[N, ..., C]`` instead of ``[N, C, ...]``.
        own_communicator (bool, default False): Create a separate process group for these layers,
            with the same ranks as `process_group`. All these ranks must call this function. Then
            the layers' communication neither waits for gradient communication nor mixes with it.
        deterministic (bool, default False): Sum over processes in rank order, at a higher
            communication cost.

    Returns:
        The model, or the new layer if `module` is a batch normalization layer.

    Warns:
        UserWarning: If a layer is left unchanged. The message contains the layer's name.

    Example:
        >>> import torch
        >>> from torchfuse.parallel import convert_syncbn_model
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> convert_syncbn_model(model)[1].layer_name
        '1'
    """
    if own_communicator:
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        process_group = dist.new_group(ranks, use_local_synchronization=ranks is not None)
    done: dict[nn.Module, nn.Module] = {}

    def convert(layer: nn.Module, name: str) -> nn.Module:
        if isinstance(layer, SyncBatchNorm) and process_group is not None:
            layer.process_group = process_group
        if _is_to_convert(layer, name):
            new = SyncBatchNorm(
                int(layer.num_features),  # type: ignore[arg-type]
                process_group=process_group or getattr(layer, "process_group", None),
                channel_last=channel_last,
                deterministic=deterministic,
                device="meta",
            )
            _take_over(new, layer)
            new.layer_name = name
            if not isinstance(layer, nn.SyncBatchNorm):
                setattr(new, _ORIGIN, type(layer))
            return new
        for child_name, child in layer.named_children():
            if child not in done:
                done[child] = convert(child, f"{name}.{child_name}" if name else child_name)
        _replace_children(layer, done)
        return layer

    return convert(module, "")


def revert_syncbn_model(module: nn.Module) -> nn.Module:
    """Replaces `SyncBatchNorm` layers with the original `nn.BatchNorm*`, for example for export.

    Args:
        module (torch.nn.Module): Model to change in place, or a `SyncBatchNorm` layer.

    Returns:
        The model, or the new layer if `module` is a `SyncBatchNorm` layer.

    Raises:
        ValueError: If a layer uses `fuse_relu` or `channel_last`, which `nn.BatchNorm*` does not
            support, or contains modules such as parametrizations.

    Example:
        >>> import torch
        >>> from torchfuse.parallel import convert_syncbn_model, revert_syncbn_model
        >>> revert_syncbn_model(convert_syncbn_model(torch.nn.BatchNorm2d(8)))
        BatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
    """
    if isinstance(module, SyncBatchNorm):
        if module.fuse_relu or module.channel_last:
            raise ValueError(
                f"revert_syncbn_model: expected layer '{module.layer_name}' to be without "
                "fuse_relu and channel_last, which nn.BatchNorm does not support. Replace this "
                "layer manually."
            )
        if module._modules:
            raise ValueError(
                f"revert_syncbn_model: expected layer '{module.layer_name}' to contain no modules, "
                f"got {', '.join(module._modules)}. Remove these modules first; they would be lost."
            )
        origin = getattr(module, _ORIGIN, _BatchNormOfAnyDimension)
        plain: nn.Module = origin(module.num_features, device="meta")
        _take_over(plain, module)
        return plain
    done = {child: revert_syncbn_model(child) for child in module.children()}
    _replace_children(module, done)
    return module


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Creates groups of `group_size` consecutive ranks and returns this process's group.

    All processes must call this function. It behaves like apex's function with the same name.

    Args:
        group_size (int): Number of processes that share statistics, a divisor of the world size. 0
            means all processes.

    Returns:
        The group, or None (the default group) if `group_size` is 0 or the world size.

    Raises:
        ValueError: If `group_size` is negative or not a divisor of the world size.

    Example:
        >>> from torchfuse.parallel import create_syncbn_process_group
        >>> create_syncbn_process_group(0) is None
        True
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if group_size < 0 or world_size % group_size != 0:
        raise ValueError(
            f"create_syncbn_process_group: expected group_size to be a divisor of the world size, "
            f"{world_size}, got {group_size}."
        )
    if group_size == world_size:
        return None
    groups: list[dist.ProcessGroup] = [
        dist.new_group(list(range(first, first + group_size)))
        for first in range(0, world_size, group_size)
    ]
    return groups[dist.get_rank() // group_size]


def _is_to_convert(layer: nn.Module, name: str) -> bool:
    if not isinstance(layer, _BatchNorm) or isinstance(layer, SyncBatchNorm):
        return False
    # The class's forward, or a replacement that a tool has set on the layer.
    forward = getattr(layer.forward, "__func__", layer.forward)
    if forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        reason = "has a custom forward, which would be lost"
    elif isinstance(layer, _LazyNormBase):
        reason = "has not seen a batch yet"
    elif layer._modules:
        reason = f"contains {', '.join(layer._modules)}, which would be lost"
    else:
        return True
    warnings.warn(
        f"convert_syncbn_model did not convert layer '{name}': {type(layer).__name__} {reason}.",
        stacklevel=4,
    )
    return False


def _take_over(new: nn.Module, old: nn.Module) -> None:
    """Assigns the settings, parameters, buffers and hooks of `old` to `new`, without copies."""
    for setting in _SETTINGS:
        setattr(new, setting, getattr(old, setting))
    new._parameters = old._parameters.copy()
    new._buffers = old._buffers.copy()
    new._non_persistent_buffers_set = old._non_persistent_buffers_set.copy()
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(old, hooks))


def _replace_children(layer: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    for name, child in layer._modules.items():
        if child is not None and replacements.get(child, child) is not child:
            layer._modules[name] = replacements[child]
