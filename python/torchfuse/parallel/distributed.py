# SPDX-License-Identifier: BSD-3-Clause
"""Data parallelism with apex's arguments and torch's engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse.parallel import _arguments
from torchfuse.parallel._process_end import Engine as _Engine
from torchfuse.parallel._ranks import require_group
from torchfuse.parallel.flat import Reducer, broadcast_parameters

__all__ = ["DistributedDataParallel", "Reducer"]

_NAME = "DistributedDataParallel"
# How torch's engine begins when a gradient of the backward pass before is missing.
_MISSING_GRADIENT = "Expected to have finished reduction in the prior iteration"


@dataclasses.dataclass
class _Reduction:
    """What is done with each bucket of gradients.

    It does not know the module: that would be a cycle through the engine, which nothing collects.
    """

    always_fp32: bool
    average: bool
    predivide_factor: float
    retain: bool
    enabled: bool = True
    started: bool = False
    buffers: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def fresh(self) -> _Reduction:
        """The same settings, before the first backward pass."""
        return dataclasses.replace(self, started=False, buffers={})


def _reduce(reduction: _Reduction, bucket: Any) -> Any:
    """Sums a bucket over all processes, in place, and scales it as apex does.

    The engine calls it with a `torch.distributed.GradBucket` for a future of the result.
    """
    gradients = bucket.buffer()
    reduction.started = True
    if reduction.retain:
        reduction.buffers[bucket.index()] = gradients
    if not reduction.enabled:  # since the forward pass
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
        # The value of the future, and not `summed`: so it is known to the stream in use here.
        result = future.value()[0]
        if reduction.average:
            result.mul_(factor)
        return result if result.dtype == gradients.dtype else gradients.copy_(result)

    work = dist.all_reduce(summed, async_op=True)
    assert work is not None
    return work.get_future().then(finish)


class DistributedDataParallel(nn.Module):
    r"""Averages the gradients of a module over all processes during the backward pass.

    It has the arguments and the behavior of `apex.parallel.DistributedDataParallel`, while
    `torch.nn.parallel.DistributedDataParallel` does the work, over the default process group. New
    programs have no reason to prefer it to torch's own.

    The parameters of rank 0 are broadcast in the constructor. Buffers, such as the running
    statistics of a batch normalization, never are: each process keeps its own, as with apex.

    A gradient is reduced as

    .. math::
        g \leftarrow \frac{f}{n} \sum_{r=1}^{n} \frac{g_r}{f}

    with :math:`n` processes and the `gradient_predivide_factor` :math:`f`. As gradients are when
    they are reduced, so they are after it: what has been accumulated before counts too.

    Args:
        module: the module to train; on one type of device.
        message_size: a bucket of gradients is sent when it has so many elements of the module's
            widest dtype; dtypes never share a bucket.
        delay_allreduce: sends one bucket for each dtype, after the last gradient of it, and takes
            parameters without a gradient, in some or all processes.
        shared_param: None; apex has removed it.
        allreduce_trigger_params: parameters of the module, or None. No effect: when a bucket is
            sent does not change its values.
        retain_allreduce_buffers: gradients become views of the flat `allreduce_buffers`.
        allreduce_always_fp32: sums 16-bit gradients in fp32, and rounds once.
        num_allreduce_streams: at least 1, and 1 with `delay_allreduce`. No effect otherwise.
        allreduce_communicators: None, or a pair of lists, process groups and streams, of
            `num_allreduce_streams` items each; the groups span all processes. No effect.
        gradient_average: False leaves out the factor :math:`f / n`.
        gradient_predivide_factor: :math:`f`, positive and finite; keeps sums of many fp16
            gradients in range.
        gradient_average_split_factor: None; `gradient_predivide_factor` has replaced it.
        prof: no effect; torch's profiler shows the engine by itself.

    Attributes:
        module: the argument. Keys of the state dict begin with `module.`.
        world_size: number of processes, as a float.

    Raises:
        TypeError: for a module that is none.
        ValueError: for a value out of range, arguments that exclude each other, and a parameter
            that is lazy or on a device that the group does not serve.
        RuntimeError: without a process group, for parameters that differ between processes, and in
            `forward` if a parameter got no gradient in the backward pass before.

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
        With `delay_allreduce` torch looks for unused parameters in each forward pass. It says so
        once if there are none; this is no error.

        Copies and pickles are those of the module and the arguments: the engine is made again in
        the next forward pass. It is also made again when parameters are frozen, thawed or moved,
        which all processes have to do together.

        Differences from apex: bf16 and fp64 gradients are reduced as they are; a parameter that is
        never used needs `delay_allreduce`; copies and pickles work; it runs on the CPU too.
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
        _arguments.check_at_least_one("message_size", message_size)
        _arguments.check_at_least_one("num_allreduce_streams", num_allreduce_streams)
        _arguments.check_removed(shared_param, gradient_average_split_factor)
        _arguments.check_delayed(delay_allreduce, num_allreduce_streams, allreduce_trigger_params)
        _arguments.check_predivide_factor(gradient_predivide_factor)
        _arguments.check_trigger_params(module, allreduce_trigger_params)
        require_group(_NAME)
        _arguments.check_communicators(allreduce_communicators, num_allreduce_streams)
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
        """Whether the buckets of the parameters as they are now have not been reduced yet."""
        return not self._reduction.started

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """Flat gradients of the last backward pass, if `retain_allreduce_buffers`; else empty."""
        return [buffer for _, buffer in sorted(self._reduction.buffers.items())]

    def enable_allreduce(self) -> None:
        """Lets backward passes reduce gradients again; call it before the forward pass."""
        self._reduction.enabled = True

    def disable_allreduce(self) -> None:
        """Keeps backward passes from reducing, from the next one on; gradients accumulate."""
        self._reduction.enabled = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module."""
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
                f"{_NAME}: expected every parameter that requires a gradient to get one in the "
                "backward pass before, got none for some, listed in the error above. Give "
                "delay_allreduce=True, or set requires_grad of these to False."
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
        # Without annotations: the engine does not take them as text.
        engine.register_comm_hook(self._reduction, lambda state, bucket: _reduce(state, bucket))
        return engine

    def _set_engine(self, engine: _Engine | None, described: list[Any] | None = None) -> None:
        # As a plain attribute: its module is a child of this one already.
        object.__setattr__(self, "_engine", engine)
        self._described = described or []

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_engine=None, _described=[], _reduction=self._reduction.fresh())
        return state
