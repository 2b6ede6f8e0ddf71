# SPDX-License-Identifier: BSD-3-Clause
"""Parameter states: tensors, dtypes, fp32 masters and step counts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchfuse import _C
from torchfuse._shown import shown
from torchfuse.optimizers.distributed import (
    MATRICES,
    STOCHASTIC,
    Numbers,
    element_numbers,
    is_dtensor,
    local_part,
)
from torchfuse.optimizers.ema import EMA, ema_dtype
from torchfuse.optimizers.options import HALF_DTYPES

if TYPE_CHECKING:
    from torchfuse.optimizers.fused_optimizer import FusedOptimizer

PARAM_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

#: State names of all algorithms, to detect checkpoints of other classes.
EVERY_STATE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_norm", "momentum_buffer", "sum")
)

#: State keys and dtypes of masters. A 16-bit parameter has either an fp32 master or, for bf16, a
#: remainder.
MASTER = "master_param"
REMAINDER = "param_remainder"
MASTER_DTYPES = {MASTER: torch.float32, REMAINDER: torch.int16}


def has_value(tensor: Tensor) -> bool:
    """Returns whether the tensor has values, unlike fake and meta tensors."""
    return not (tensor.is_meta or is_fake(tensor))


# --- Names and dtypes ----------------------------------------------------------------------------


@functools.cache
def names_of(algorithm: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of all states, and of the states with one number per parameter."""
    native = _C.FusedStep(algorithm)
    return tuple(native.state_names), tuple(native.tensor_state_names)


def needed_names(optimizer: FusedOptimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """Returns the state and storage names that a plan for the group depends on."""
    names = optimizer._state_names(group)
    if optimizer.defaults["ema_decay"] is not None:
        names = (*names, EMA)
    if group.get("stochastic_rounding"):
        return (*names, "stochastic_rounding")
    if not group["master_weights"]:
        return names
    return (*names, REMAINDER if group.get("store_param_remainders") else MASTER)


def empty_state(optimizer: FusedOptimizer, name: str, param: Tensor, group: Any) -> Tensor:
    """Allocates a state or master, with the parameter's strides or as one number."""
    if name in names_of(optimizer._algorithm)[1]:
        wide = param.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        return torch.empty((), dtype=dtype, device=param.device)
    if name == EMA:
        dtype = ema_dtype(param)
    else:
        dtype = MASTER_DTYPES.get(name) or _state_dtype(optimizer, param, group, name)
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _state_dtype(
    optimizer: FusedOptimizer, param: Tensor, group: dict[str, Any], name: str
) -> torch.dtype:
    own = group.get(f"{name.removeprefix('max_')}_dtype")
    dtype: torch.dtype | None = group["state_dtype"] if own is None else own
    if dtype is not None:
        return dtype
    return torch.float32 if param.dtype in HALF_DTYPES else param.dtype


# --- Creation ------------------------------------------------------------------------------------


def takes_part(optimizer: FusedOptimizer, param: Tensor) -> bool:
    """Returns whether a step needs the parameter's state."""
    return param.grad is not None or bool(optimizer.state.get(param))


def create_state(optimizer: FusedOptimizer, param: Tensor, group: dict[str, Any]) -> None:
    """Creates the parameter's missing states for the next step, and drops unused masters."""
    state = optimizer.state[param]
    for name in optimizer._state_names(group):
        if state.get(name) is None:
            state[name] = optimizer._begin_state(param, group, name)
    if group.get("stochastic_rounding"):
        drop_master(state)
    elif param.dtype not in HALF_DTYPES:
        take_master(param, state)
    elif group["master_weights"]:
        remainders = bool(group.get("store_param_remainders"))
        create_master(param, state, remainders and param.dtype == torch.bfloat16)
    if optimizer.ema_decay is not None and state.get(EMA) is None:
        state[EMA] = _begin_ema(optimizer, param, group)


def _begin_ema(optimizer: FusedOptimizer, param: Tensor, group: dict[str, Any]) -> Tensor:
    """Returns the average's initial value: a copy of the master or the parameter."""
    value = local_part(param.detach())
    masters = {
        name: local_part(tensor)
        for name, tensor in optimizer.state[param].items()
        if name in MASTER_DTYPES
    }
    if MASTER in masters and has_value(param):
        # The master may be older than the parameter. The step detects outdated masters too late.
        _C.remake_master(value, masters[MASTER])
    master = master_of(value, masters)
    ema = empty_state(optimizer, EMA, param, group)
    local_part(ema).copy_(value if master is None else master)
    return ema


def prepare_states(optimizer: FusedOptimizer, caller: str) -> None:
    """Checks the parameters that the step updates, and creates missing states."""
    params: list[Tensor] = []
    for index, group in enumerate(optimizer.param_groups):
        # This step does not update apex's count, which is for subclasses with apex's step().
        group.pop("step", None)
        for place, param in enumerate(group["params"]):
            if not group["master_weights"]:  # a kept master would be outdated in a later step
                drop_master(optimizer.state.get(param, {}))
            if not takes_part(optimizer, param):
                continue
            if param.dtype not in PARAM_DTYPES or type(param) is not torch.nn.Parameter:
                check_param(caller, index, place, param)
            refuse_capture(optimizer, param, group)
            check_memory(caller, index, place, param, optimizer.state.get(param, {}))
            optimizer._create_state(param, group)
            check_count(caller, index, place, optimizer.state[param].get("step"))
            params.append(param)
    view_steps(optimizer, params)


def numbers_in_whole(optimizer: FusedOptimizer, caller: str) -> list[Numbers]:
    """Returns each shard's position in the full parameter; see element_numbers()."""
    numbers: list[Numbers] = []
    for index, group in enumerate(optimizer.param_groups):
        use = MATRICES if group.get("use_muon") else STOCHASTIC
        wanted = group.get("stochastic_rounding") or group.get("use_muon")
        for place, param in enumerate(group["params"]):
            where = f"{caller}: expected params[{place}] of group {index}"
            needed = wanted and takes_part(optimizer, param)
            numbers.append(element_numbers(param, where, use) if needed else (0, 0, 0))
    return numbers


def step_on_fakes(optimizer: FusedOptimizer) -> bool:
    """Creates missing states if parameters are fake tensors, and returns whether they are.

    Memory estimators run a training step under FakeTensorMode and count the remaining tensors. Such
    a step computes nothing.
    """
    first = next((group["params"][0] for group in optimizer.param_groups if group["params"]), None)
    if first is None or type(first) is torch.nn.Parameter or not is_fake(first):
        return False
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    optimizer._create_state(param, group)
                    count = local_part(param).new_zeros((), dtype=torch.float32)
                    optimizer.state[param].setdefault("step", count)
    return True


def view_steps(optimizer: FusedOptimizer, params: Sequence[Tensor]) -> None:
    """Replaces the parameters' step counts with views of one buffer per device.

    A count in shared memory is not moved.
    """
    own: list[Tensor] = []
    for param in params:
        shared = _shared_step(param, optimizer.state[param].get("step"))
        if shared is None:
            own.append(param)
        else:
            optimizer.state[param]["step"] = shared
    views = _C.step_views(own, [optimizer.state[param].get("step") for param in own])
    for param, view in zip(own, views, strict=True):
        optimizer.state[param]["step"] = view


def _shared_step(param: Tensor, step: object) -> Tensor | None:
    # is_shared() is only meaningful on the CPU.
    on_cpu = isinstance(step, Tensor) and step.is_cpu and param.is_cpu
    if not isinstance(step, Tensor) or not on_cpu or not step.is_shared():
        return None
    if step.numel() == 1 and step.dtype == torch.float32:
        return step.view(())
    warnings.warn(
        f"A step count in shared memory has shape {list(step.shape)} and dtype {step.dtype}, so "
        "each process continues with its own copy. To share the count, use a 1-element "
        "torch.float32 tensor.",
        stacklevel=2,
    )
    return None


# --- Masters -------------------------------------------------------------------------------------


def master_of(param: Tensor, state: Mapping[str, Any]) -> Tensor | None:
    """Returns the master or None. A remainder's master is a copy: do not write to it."""
    remainder = state.get(REMAINDER)
    if remainder is None:
        return state.get(MASTER)
    return _C.master_of_remainder(param.detach(), remainder)


def drop_master(state: dict[str, Any]) -> None:
    """Removes the master. Updates continue from the parameter's value."""
    for name in (MASTER, REMAINDER):
        state.pop(name, None)


def take_master(param: Tensor, state: dict[str, Any]) -> None:
    """Copies the master to a parameter that is no longer 16-bit, as after model.float()."""
    for master in map(state.get, MASTER_DTYPES):
        if master is not None:
            _C.take_master(local_part(param.detach()), local_part(master))
    drop_master(state)


def create_master(param: Tensor, state: dict[str, Any], as_remainder: bool) -> None:
    """Adds the master to `state`, converted from the other form or copied from `param`."""
    wanted, other = (REMAINDER, MASTER) if as_remainder else (MASTER, REMAINDER)
    found = state.get(other)
    if wanted not in state:
        state[wanted] = _converted(param.detach(), found, as_remainder)
    state.pop(other, None)


def _converted(param: Tensor, other: Tensor | None, as_remainder: bool) -> Tensor:
    """Returns a master or remainder, converted from the other form or made from `param`."""
    if not as_remainder:
        return param.to(torch.float32) if other is None else _C.master_of_remainder(param, other)
    if other is not None:
        return _C.remainder_of_master(other)
    return torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)


def remake_masters(optimizer: FusedOptimizer, params: Iterable[Tensor] | None) -> None:
    """Updates masters to match their parameters; None means all parameters."""
    known = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    wanted = list(known.values()) if params is None else list(params)
    for index, param in enumerate(wanted):
        if id(param) not in known:
            raise ValueError(
                f"{type(optimizer).__name__}.remake_masters: expected params[{index}] to be a "
                f"parameter of the optimizer, got another tensor of shape {list(param.shape)}."
            )
    for param in wanted:
        state = optimizer.state.get(param, {})
        if param.dtype not in HALF_DTYPES:
            take_master(param, state)
        for master in map(state.get, MASTER_DTYPES):
            if master is not None:
                _C.remake_master(local_part(param.detach()), local_part(master))


def groups_with_masters(optimizer: FusedOptimizer) -> list[dict[str, list[Tensor]]] | None:
    """Returns the groups with masters in place of parameters, or None without masters."""
    masters = [
        [master_of(p, optimizer.state.get(p, {})) for p in group["params"]]
        for group in optimizer.param_groups
    ]
    if all(master is None for group in masters for master in group):
        return None
    return [
        {"params": [p if m is None else m for p, m in zip(group["params"], ms, strict=True)]}
        for group, ms in zip(optimizer.param_groups, masters, strict=True)
    ]


# --- Checks --------------------------------------------------------------------------------------


def check_params(owner: str, group: int, params: Sequence[Tensor]) -> None:
    """Raises for trainable parameters that no kernel can update.

    Frozen weights of quantized models may have other dtypes. Lazy parameters get a dtype and shape
    in the first forward pass. Plans check every parameter that has a gradient.
    """
    for index, param in enumerate(params):
        if param.requires_grad and not is_lazy(param):
            check_param(owner, group, index, param)


def check_param(owner: str, group: int, index: int, param: Tensor) -> None:
    """Raises TypeError or ValueError for a parameter that no kernel can update."""
    where = f"{owner}: expected params[{index}] of group {group} to be"
    if is_dtensor(param):
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(
                f"{where} sharded or replicated, got the placements {param.placements}. "
                "Redistribute it before it becomes a parameter."
            )
    elif is_traceable_wrapper_subclass(param):
        raise TypeError(
            f"{where} a plain tensor or a DTensor, got {type(param).__name__}. "
            "Pass the tensors that the subclass wraps."
        )
    if param.layout != torch.strided:
        raise ValueError(f"{where} dense, got layout {param.layout}.")
    if param.dtype not in PARAM_DTYPES:
        raise ValueError(f"{where} fp32, fp16, bf16 or fp64, got {param.dtype}.")
    local = local_part(param)
    if local.is_neg() or local._is_zerotensor():
        raise ValueError(
            f"{owner}: expected params[{index}] of group {group} to hold its own values, got "
            + (
                "a view with the negative bit. Pass tensor.resolve_neg()."
                if local.is_neg()
                else "zeros without memory. Pass tensor.clone()."
            )
        )
    if not _fills_its_memory(local):
        raise ValueError(
            f"{where} without gaps or overlap in memory, got sizes {tuple(param.shape)} with "
            f"strides {param.stride()}. Create the parameter from tensor.contiguous()."
        )


def _fills_its_memory(tensor: Tensor) -> bool:
    """Returns whether the tensor is dense, with dimensions in any order."""
    if tensor.numel() == 0:
        return True
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def check_listed_once(owner: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks that groups contain only tensors, and no tensor twice.

    torch checks new groups, but not lists that a program edits later.
    """
    places: dict[int, str] = {}
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            place = f"params[{position}] of group {index}"
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"{owner}: expected {place} to be a tensor, got {type(param).__name__}."
                )
            first = places.setdefault(id(param), place)
            if first != place:
                raise ValueError(
                    f"{owner}: expected each parameter to be listed once, got {place}, which is "
                    f"{first} too. Remove the duplicate."
                )


def check_memory(caller: str, group: int, place: int, param: Tensor, state: Any) -> None:
    """Raises RuntimeError for tensors whose storage was freed; torch's operations would crash.

    The native step checks every tensor that a kernel reads. This function checks tensors that are
    read earlier, to create and convert states.
    """
    named = {"": param, **{f"{name} of ": state.get(name) for name in (*MASTER_DTYPES, "step")}}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            continue
        local = local_part(tensor)
        if is_traceable_wrapper_subclass(local) or local.layout != torch.strided:
            continue  # check_param() and check_count() raise for these tensors
        size, offset, there = local.element_size(), local.storage_offset(), local.untyped_storage()
        last = offset + sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
        if local.numel() != 0 and (last + 1) * size > there.nbytes():
            raise RuntimeError(
                f"{caller}: expected {name}params[{place}] of group {group} to lie within its "
                f"storage, got {local.numel()} elements of {size} bytes from element {offset} on "
                f"in a storage of {there.nbytes()} bytes. The storage was resized: resize it back "
                "before the step."
            )


def check_count(caller: str, group: int, place: int, step: Any) -> None:
    """Checks that the step count in a parameter's state is a 1-element tensor or None."""
    if step is None:
        return
    where = f"{caller}: expected step of params[{place}] of group {group} to"
    if not isinstance(step, Tensor):
        raise TypeError(f"{where} be a tensor, got {type(step).__name__}.")
    if is_traceable_wrapper_subclass(step):
        kind = type(step).__name__
        raise TypeError(f"{where} be a plain tensor, got a {kind}. Store the wrapped tensor.")
    if step.layout != torch.strided or step.numel() != 1 or step.is_meta:
        raise ValueError(
            f"{where} hold one element, got a {step.dtype} tensor of shape {list(step.shape)}, "
            f"layout {step.layout} and device {step.device}."
        )


def check_step(expected: str, step: Any) -> None:
    """Checks a step count (number or tensor); messages begin with `expected`."""
    is_number = isinstance(step, Real) or (
        isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex()
    )
    if not is_number:
        raise ValueError(f"{expected} a number or a 1-element tensor, got {shown(step)}.")
    if isinstance(step, Tensor):
        if not has_value(step):
            return
        step = step.item()
    # Counts are stored in fp32. Compare first, because int() raises for a NaN.
    if not (0 <= step <= torch.finfo(torch.float32).max and step == int(step)):
        raise ValueError(f"{expected} a whole number of at least 0, and finite, got {step}.")


def refuse_capture(optimizer: FusedOptimizer, param: Tensor, group: dict[str, Any]) -> None:
    """Raises if a CUDA graph capture would create state, which every replay would reset."""
    if not param.is_cuda or not torch.cuda.is_current_stream_capturing():
        return
    state = optimizer.state.get(param, {})
    averages = () if optimizer.ema_decay is None else (EMA,)
    names = (*optimizer._state_names(group), *averages, "step")
    if any(state.get(name) is None for name in names):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: the first step cannot be captured in a CUDA graph. "
            "Run at least one step before the capture."
        )
