# SPDX-License-Identifier: BSD-3-Clause
"""Data parallelism with apex's arguments and torch's engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse.parallel._process_end import Engine as _Engine
from torchfuse.parallel._ranks import require_group
from torchfuse.parallel.flat import broadcast_parameters

_NAME = "DistributedDataParallel"
# Beginning of torch's error if a gradient was missing in the previous backward pass.
_MISSING_GRADIENT = "Expected to have finished reduction in the prior iteration"


@dataclasses.dataclass
class _Reduction:
    """Options for reducing a bucket of gradients.

    Must not refer to the module, because a reference cycle through the engine is never collected.
    """

    always_fp32: bool
    average: bool
    predivide_factor: float
    retain: bool
    enabled: bool = True
    started: bool = False
    buffers: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def fresh(self) -> _Reduction:
        """Returns a copy in its state before the first backward pass."""
        return dataclasses.replace(self, started=False, buffers={})


def _reduce(reduction: _Reduction, bucket: Any) -> Any:
    """Sums a `torch.distributed.GradBucket` over all processes and scales the sum as apex does.

    Returns a future with the result, which the engine requires.
    """
    gradients = bucket.buffer()
    reduction.started = True
    if reduction.retain:
        reduction.buffers[bucket.index()] = gradients
    if not reduction.enabled:  # disabled after the forward pass
        devices = [] if gradients.device.type == "cpu" else [gradients.device]
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        done.set_result(gradients)
        return done
    is_short = gradients.dtype in (torch.float16, torch.bfloat16)
    summed = gradients.float() if reduction.always_fp32 and is_short else gradients
    if reduction.predivide_factor != 1.0:
        summed.mul_(1.0 / reduction.predivide_factor)
    factor = reduction.predivide_factor / dist.get_world_size()

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        # Not `summed`, because only the future's value is synchronized with the current stream.
        result = future.value()[0]
        if reduction.average:
            result.mul_(factor)
        return result if result.dtype == gradients.dtype else gradients.copy_(result)

    work = dist.all_reduce(summed, async_op=True)
    assert work is not None
    return work.get_future().then(finish)


class DistributedDataParallel(nn.Module):
    r"""Averages a module's gradients over all processes during the backward pass.

    The class provides the arguments and the behavior of `apex.parallel.DistributedDataParallel`,
    implemented by `torch.nn.parallel.DistributedDataParallel` on the default process group. New
    programs should use torch's class directly.

    The constructor broadcasts parameters from rank 0. Buffers, such as the running statistics of
    batch normalization, are never broadcast, as in apex. Each process keeps its own buffers.

    A gradient is reduced as

    .. math::
        g \leftarrow \frac{f}{n} \sum_{r=1}^{n} \frac{g_r}{f}

    with :math:`n` processes and the `gradient_predivide_factor` :math:`f`. The reduction includes
    gradients that earlier backward passes have accumulated. `apex.amp.scale_loss` sets accumulated
    gradients aside, so between `disable_allreduce()` and `enable_allreduce()`, pass
    `delay_unscale=True` to `scale_loss`.

    Args:
        module (torch.nn.Module): Module to train, with all parameters on one device type.
        message_size (int, default 10000000): Bucket size, in elements of the module's widest dtype.
            A bucket contains gradients with the same dtype and is sent when full.
        delay_allreduce (bool, default False): Send one bucket for each dtype, after the last
            gradient. Accepts parameters without a gradient, on some or all ranks.
        shared_param (None, default None): Must be None; removed in apex.
        allreduce_trigger_params (Iterable[Tensor] | None, default None): Parameters of the module.
            Ignored, because the time when a bucket is sent does not change the result.
        retain_allreduce_buffers (bool, default False): Make gradients views of the flat
            `allreduce_buffers`.
        allreduce_always_fp32 (bool, default False): Sum 16-bit gradients in fp32 and round once.
        num_allreduce_streams (int, default 1): Ignored. At least 1, and 1 with `delay_allreduce`.
        allreduce_communicators (Sequence | None, default None): Ignored. A list of process groups
            and a list of streams, each with `num_allreduce_streams` items. Each group must contain
            all processes.
        gradient_average (bool, default True): If False, the factor :math:`f / n` is omitted.
        gradient_predivide_factor (float, default 1.0): :math:`f`, positive and finite. Keeps sums
            of many fp16 gradients in range.
        gradient_average_split_factor (None, default None): Must be None; replaced by
            `gradient_predivide_factor`.
        prof (bool, default False): Ignored, because torch's profiler always shows the reduction.

    Attributes:
        module: The constructor argument. State dict keys begin with `module.`.
        world_size: Number of processes, as a float.

    Raises:
        TypeError: If `module` is not a `torch.nn.Module`.
        ValueError: If a value is out of range, arguments exclude each other, or a parameter is lazy
            or on a device that the group does not support.
        RuntimeError: If there is no process group; if parameters differ between ranks; or in
            `forward`, if a parameter received no gradient in the previous backward pass.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torchfuse.optimizers import FusedAdam
        >>> from torchfuse.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(3, 2))
        >>> optimizer = FusedAdam(model.parameters())
        >>> for last in (False, True):  # two micro-batches, reduced once
        ...     model.enable_allreduce() if last else model.disable_allreduce()
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()

    Notes:
        With `delay_allreduce`, torch searches for unused parameters in each forward pass. If all
        parameters are used, torch prints one harmless warning.

        Copies and pickles contain the module and the arguments. The next forward pass creates a new
        engine. Freezing, unfreezing or moving parameters also creates a new engine, so all ranks
        must make the same change.

        Differences from apex:

        - bf16 and fp64 gradients are reduced in their dtype.
        - A parameter that is never used requires `delay_allreduce`.
        - Copies and pickles work.
        - The CPU is supported.
    """

    module: torch.nn.Module
    world_size: float
    _engine: _Engine | None

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Iterable[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Sequence[Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"{_NAME}: expected module to be a torch.nn.Module, got {type(module).__name__}."
            )
        _check_at_least_one("message_size", message_size)
        _check_at_least_one("num_allreduce_streams", num_allreduce_streams)
        _check_removed(shared_param, gradient_average_split_factor)
        _check_delayed(delay_allreduce, num_allreduce_streams, allreduce_trigger_params)
        factor = gradient_predivide_factor
        if not (isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"{_NAME}: expected gradient_predivide_factor to be positive and finite, got "
                f"{factor!r}."
            )
        _check_trigger_params(module, allreduce_trigger_params)
        require_group(_NAME)
        _check_communicators(allreduce_communicators, num_allreduce_streams)
        broadcast_parameters(_NAME, module)
        self.module = module
        self.world_size = float(dist.get_world_size())
        self._message_size = message_size
        self._delay = bool(delay_allreduce)
        self._reduction = _Reduction(
            bool(allreduce_always_fp32),
            bool(gradient_average),
            float(gradient_predivide_factor),
            bool(retain_allreduce_buffers),
        )
        self._set_engine(None)

    @property
    def needs_refresh(self) -> bool:
        """Whether no backward pass has reduced gradients of the current parameters yet."""
        return not self._reduction.started

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """Flat gradients from the last backward pass; empty without `retain_allreduce_buffers`."""
        return [buffer for _, buffer in sorted(self._reduction.buffers.items())]

    def enable_allreduce(self) -> None:
        """Enables the reduction again; call before the forward pass."""
        self._reduction.enabled = True

    def disable_allreduce(self) -> None:
        """Disables the reduction from the next backward pass on, so that gradients accumulate."""
        self._reduction.enabled = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module with the given arguments and returns its result."""
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if not (torch.is_grad_enabled() and trainable):
            return self.module(*inputs, **kwargs)
        described = [(id(item), item.dtype, item.device) for item in trainable]
        engine = self._engine
        if engine is None or described != self._described:
            engine = self._make_engine(trainable)
            self._set_engine(engine, described)
        engine.require_backward_grad_sync = self._reduction.enabled
        if self._reduction.enabled:
            self._reduction.buffers.clear()
        try:
            return engine(*inputs, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(_MISSING_GRADIENT):
                raise
            raise RuntimeError(
                f"{_NAME}: some parameters received no gradient in the previous backward pass; the "
                "error above lists the parameters. Pass delay_allreduce=True, or set "
                "requires_grad=False for these parameters."
            ) from error

    def _make_engine(self, trainable: list[nn.Parameter]) -> _Engine:
        if self._delay:
            size = sum(parameter.numel() * parameter.element_size() for parameter in trainable) + 1
        else:
            size = self._message_size * max(parameter.element_size() for parameter in trainable)
        engine = _Engine(
            self.module,
            broadcast_buffers=False,
            init_sync=False,
            bucket_cap_mb=size / 2**20,
            find_unused_parameters=self._delay,
            gradient_as_bucket_view=self._reduction.retain,
        )
        self._reduction = self._reduction.fresh()
        # A lambda, because the engine rejects functions whose annotations are strings.
        engine.register_comm_hook(self._reduction, lambda state, bucket: _reduce(state, bucket))
        return engine

    def _set_engine(self, engine: _Engine | None, described: list[Any] | None = None) -> None:
        # Not registered as a child module, because self.module is registered already.
        object.__setattr__(self, "_engine", engine)
        self._described = described or []

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_engine=None, _described=[], _reduction=self._reduction.fresh())
        return state


def _check_at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{_NAME}: expected {name} to be an int of at least 1, got {value!r}.")


def _check_removed(shared_param: bool | None, split_factor: float | None) -> None:
    if shared_param is not None:
        raise ValueError(
            f"{_NAME}: expected shared_param to be None, got {shared_param!r}. Shared parameters "
            "need no option. To reduce after the backward pass, pass delay_allreduce=True."
        )
    if split_factor is not None:
        raise ValueError(
            f"{_NAME}: expected gradient_average_split_factor to be None, got {split_factor!r}. "
            "Pass gradient_predivide_factor."
        )


def _check_delayed(delay: bool, streams: int, triggers: Iterable[Tensor] | None) -> None:
    if delay and streams > 1:
        raise ValueError(
            f"{_NAME}: expected num_allreduce_streams to be 1 with delay_allreduce=True, "
            f"got {streams}. Pass only one of these arguments."
        )
    if delay and triggers is not None:
        raise ValueError(
            f"{_NAME}: expected allreduce_trigger_params to be None with delay_allreduce=True, "
            "got parameters. Pass only one of these arguments."
        )


def _check_trigger_params(module: nn.Module, triggers: Iterable[Tensor] | None) -> None:
    known = {id(parameter) for parameter in module.parameters()}
    for index, parameter in enumerate(triggers or ()):
        if id(parameter) not in known:
            raise ValueError(
                f"{_NAME}: expected allreduce_trigger_params[{index}] to be a parameter of module, "
                f"got {type(parameter).__name__}. Use items of module.parameters()."
            )


def _check_communicators(communicators: Sequence[Sequence[Any]] | None, streams: int) -> None:
    if communicators is None:
        return
    if streams == 1 or [len(items) for items in communicators] != [streams, streams]:
        raise ValueError(
            f"{_NAME}: expected allreduce_communicators to contain num_allreduce_streams groups "
            f"and as many streams, at least 2, got {[len(items) for items in communicators]} and "
            f"num_allreduce_streams={streams}."
        )
    for index, group in enumerate(communicators[0]):
        if dist.get_world_size(group) != dist.get_world_size():
            raise ValueError(
                f"{_NAME}: expected allreduce_communicators[0][{index}] to span all "
                f"{dist.get_world_size()} processes, got {dist.get_world_size(group)}. Gradients "
                "are always reduced over the default group."
            )
