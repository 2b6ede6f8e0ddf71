# SPDX-License-Identifier: BSD-3-Clause
"""Converts `nn.BatchNorm*` to `SyncBatchNorm` and back, and creates process groups for it."""

from __future__ import annotations

import warnings

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from torchfuse.parallel.sync_batch_norm import SyncBatchNorm

# The attributes that hold hooks, and those that say how torch calls each hook.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)
_SETTINGS = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training")
_ORIGIN = "_converted_from"


class _BatchNormOfAnyDimension(_BatchNorm):
    """The reverted form of a layer that was created as `SyncBatchNorm`."""

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
    """Replaces the batch normalization layers of a model with `SyncBatchNorm`.

    The new layers have the same parameter, buffer and hook objects, so existing optimizers stay
    valid; the training flag, dtype, device and `requires_grad` are kept. A layer that occurs twice
    is replaced with one. Instance normalization is not changed. Subclasses with their own `forward`
    (for example an activation), layers that contain modules (for example a parametrization) and
    lazy layers that have not seen a batch are left unchanged with a warning.
    `revert_syncbn_model` undoes the conversion.

    Args:
        module: the model, changed in place, or a batch normalization layer itself.
        process_group: processes that share statistics; None is the default group, or the group of
            a `torch.nn.SyncBatchNorm` layer.
        channel_last: inputs are ``[N, ..., C]`` instead of ``[N, C, ...]``.
        own_communicator: create a separate process group for these layers, with the processes of
            `process_group`, all of which must call this function. The layers' communication then
            does not wait behind that of gradients, and cannot be mixed up with it.
        deterministic: sum over processes in the order of ranks, at a higher communication cost.

    Returns:
        The model, or the new layer if `module` was one.

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
            group = process_group or getattr(layer, "process_group", None)
            return _synchronized(layer, name, group, channel_last, deterministic)
        for child_name, child in layer.named_children():
            if child not in done:
                done[child] = convert(child, f"{name}.{child_name}" if name else child_name)
        _replace_children(layer, done)
        return layer

    return convert(module, "")


def revert_syncbn_model(module: nn.Module) -> nn.Module:
    """Replaces `SyncBatchNorm` layers with the original `nn.BatchNorm*`, for example for export.

    Args:
        module: the model, changed in place, or a `SyncBatchNorm` layer itself.

    Returns:
        The model, or the new layer if `module` was one.

    Raises:
        ValueError: if a layer has `fuse_relu` or `channel_last`, which `nn.BatchNorm*` lacks, or
            contains modules, such as parametrizations.

    Example:
        >>> import torch
        >>> from torchfuse.parallel import convert_syncbn_model, revert_syncbn_model
        >>> revert_syncbn_model(convert_syncbn_model(torch.nn.BatchNorm2d(8)))
        BatchNorm2d(8, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
    """
    if isinstance(module, SyncBatchNorm):
        if module.fuse_relu or module.channel_last:
            raise ValueError(
                f"revert_syncbn_model: expected layer '{module.layer_name}' to do what "
                "nn.BatchNorm does, got one with fuse_relu or channel_last. Replace it by hand."
            )
        if module._modules:
            raise ValueError(
                f"revert_syncbn_model: expected layer '{module.layer_name}' to have no modules "
                f"inside, got {', '.join(module._modules)}. Remove them first: they would be lost."
            )
        origin = getattr(module, _ORIGIN, _BatchNormOfAnyDimension)
        plain: nn.Module = origin(module.num_features, device="meta")
        _take_over(plain, module)
        return plain
    done = {child: revert_syncbn_model(child) for child in module.children()}
    _replace_children(module, done)
    return module


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Creates groups of `group_size` consecutive ranks and returns that of this process.

    All processes must call this function, which behaves like apex's of the same name.

    Args:
        group_size: number of processes that share statistics, a divisor of the world size; 0: all.

    Returns:
        The group; None, for the default group, if `group_size` is 0 or the world size.

    Raises:
        ValueError: if `group_size` is negative or not a divisor of the world size.

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
    # The forward of the class, or one that tools which wrap layers have set on the layer.
    forward = getattr(layer.forward, "__func__", layer.forward)
    if forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        reason = "has a forward of its own, which would be lost"
    elif isinstance(layer, _LazyNormBase):
        reason = "has not seen a batch yet"
    elif layer._modules:
        reason = f"has {', '.join(layer._modules)} inside, which would be lost"
    else:
        return True
    warnings.warn(
        f"convert_syncbn_model leaves layer '{name}' as it is: {type(layer).__name__} {reason}.",
        stacklevel=4,
    )
    return False


def _synchronized(
    layer: nn.Module,
    name: str,
    process_group: dist.ProcessGroup | None,
    channel_last: bool,
    deterministic: bool,
) -> SyncBatchNorm:
    new = SyncBatchNorm(
        int(layer.num_features),  # type: ignore[arg-type]
        process_group=process_group,
        channel_last=channel_last,
        deterministic=deterministic,
        device="meta",
    )
    _take_over(new, layer)
    new.layer_name = name
    if not isinstance(layer, nn.SyncBatchNorm):
        setattr(new, _ORIGIN, type(layer))
    return new


def _take_over(new: nn.Module, old: nn.Module) -> None:
    """Gives `new` the settings, parameters, buffers and hooks of `old`, as the same objects."""
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
