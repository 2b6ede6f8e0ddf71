# SPDX-License-Identifier: BSD-3-Clause
"""Checks the objects that a checkpoint saves, and loads them so that a failure can be undone."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup, get_process_group_ranks, get_rank
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from torchfuse._shown import shown
from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.serialization import check_structure, saved_options
from torchfuse.parallel import LARC, DistributedDataParallel
from torchfuse.resumable_sampler import ResumableSampler


class Stateful(Protocol):
    """An object that can be saved in a checkpoint."""

    def state_dict(self) -> Any:
        """Returns the state as plain values and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Loads the state, or raises and leaves the object unchanged."""


# --- Classes --------------------------------------------------------------------------------------


def _is_zero(part: Any) -> bool:
    """Whether `part` is a ZeroRedundancyOptimizer; does not import torch.distributed.optim."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(part, module.ZeroRedundancyOptimizer)


def class_name(part: Any) -> str | None:
    """Returns the name of the nearest torchfuse or torch class in the object's MRO, or None."""
    if isinstance(part, LARC) or _is_zero(part):
        return class_name(part.optim)
    if not isinstance(part, LRScheduler | Optimizer):
        return None
    known = (kind.__name__ for kind in type(part).__mro__ if _is_known(kind))
    return next((name for name in known if name not in ("LRScheduler", "Optimizer")), None)


def check_class(part: Stateful, name: str, saved: Any, where: str) -> None:
    """Raises ValueError if the file states a different class for the part."""
    own = class_name(part)
    written = saved.get(name) if isinstance(saved, Mapping) else None
    if None not in (own, written) and own != written:
        other = shown(written).strip("'")
        raise ValueError(
            f"{where} to hold the state of {own} as {name!r}, got the state of {other}. Pass a "
            f"{other}, or omit {name!r} and start with a new {own}."
        )


def check_schedulers(caller: str, parts: Mapping[str, Stateful]) -> None:
    """Checks that the optimizer of each scheduler is among the parts.

    A scheduler that is resumed without its optimizer continues with wrong learning rates. If any
    part is of an unknown class, nothing is checked: it may be a wrapper that contains the
    scheduler's optimizer, such as FP16_Optimizer or an optimizer from accelerate.
    """
    inner = [_inner(part) for part in parts.values()]
    optimizers = [part.optim if _is_zero(part) else part for part in inner]
    known = (LRScheduler, nn.Module, GradScaler, Sampler)
    if not all(_is_optimizer(part) or isinstance(part, known) for part in inner):
        return
    for name, part in parts.items():
        own = getattr(part, "optimizer", None) if isinstance(part, LRScheduler) else None
        if _is_optimizer(own) and all(own is not other for other in [*inner, *optimizers]):
            raise ValueError(
                f"{caller}: expected {name!r} to be the scheduler of an optimizer in the "
                f"checkpoint, got the scheduler of a {type(own).__name__} that is not in it. Add "
                "this optimizer, or build the scheduler for an optimizer in the checkpoint."
            )


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(("torchfuse.", "torch.optim."))


def _is_optimizer(part: Any) -> bool:
    """Whether a part is an optimizer from torchfuse or torch.optim, and not a wrapper of one."""
    inner = part.optim if _is_zero(part) else part
    return isinstance(inner, FusedOptimizer) or (
        isinstance(inner, Optimizer) and _is_known(type(inner))
    )


def _compiled_modules() -> tuple[type, ...]:
    """Returns the class of torch.compile(module)'s result, or () if nothing was compiled."""
    found = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return () if found is None else (found,)


def unwrapped(part: Any) -> Any:
    """Removes DistributedDataParallel and torch.compile wrappers from a module."""
    while isinstance(part, nn.Module):
        if isinstance(part, nn.parallel.DistributedDataParallel | DistributedDataParallel):
            part = part.module
        elif isinstance(part, _compiled_modules()):
            part = part._orig_mod
        else:
            break
    return part


# --- Models ---------------------------------------------------------------------------------------


def _own_names(model: nn.Module) -> dict[str, str]:
    """Maps each state dict name without torch.compile's "_orig_mod." to the model's actual name."""
    prefixes = [
        f"{name}._orig_mod."
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _compiled_modules())
    ]
    names = {}
    for name in model.state_dict():
        plain = name
        if not isinstance(name, str):  # from a user-defined state_dict()
            names[name] = name
            continue
        for prefix in reversed(prefixes):  # nested modules first
            if plain.startswith(prefix):
                plain = prefix.removesuffix("_orig_mod.") + plain.removeprefix(prefix)
        names[plain] = name
    return names


def state_of(part: Stateful) -> Any:
    """Returns a part's state dict; for a model, with the names of the model before compilation."""
    state = part.state_dict()
    if not isinstance(part, nn.Module):
        return state
    return {plain: state[name] for plain, name in _own_names(part).items()}


def in_own_names(model: nn.Module, saved: Any) -> Any:
    """Returns a saved model state with its keys changed to the model's names."""
    if not isinstance(saved, Mapping):
        return saved
    own = _own_names(model)
    named = {own.get(name, name): value for name, value in saved.items()}
    for name in [name for name in named if isinstance(name, str) and name not in own.values()]:
        plain = own.get(name.replace("_orig_mod.", ""), name)
        if plain not in named:
            named[plain] = named.pop(name)
    return named


def check_model(model: nn.Module, saved: Any, where: str) -> None:
    """Checks the names and shapes in a saved model state, and whether tensors are real."""
    own = model.state_dict()
    if not isinstance(saved, Mapping):
        raise ValueError(f"{where} to be a dict, got {type(saved).__name__}.")
    for name, value in own.items():
        if name not in saved:
            raise ValueError(f"{where} to hold {name!r}, got {shown(sorted(saved, key=str))}.")
        if isinstance(value, Tensor):
            _check_target(value, f"{where}[{name!r}] to be loaded into a tensor")
            _check_tensor(value, saved[name], f"{where}[{name!r}]")
    more = sorted(set(saved) - set(own), key=str)
    if more:
        raise ValueError(
            f"{where} to hold the parameters and buffers of the module only, got {shown(more[0])} "
            "too. Load it into the module that was saved."
        )


def _check_target(value: Tensor, where: str) -> None:
    """Checks that a model's tensor can be overwritten."""
    if is_lazy(value):
        raise ValueError(f"{where} with a shape, got a lazy parameter. Run the model once.")
    if value.is_meta:
        raise ValueError(
            f"{where} with memory, got a meta tensor. Call model.to_empty(device=...)."
        )
    if value.is_inference():
        raise ValueError(
            f"{where} that was created outside of inference mode, got an inference tensor. Build "
            "the model outside of inference mode."
        )
    if any(
        size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        raise ValueError(
            f"{where} with memory for each element, got an expanded tensor. Clone the tensor."
        )


def _check_tensor(value: Tensor, saved: Any, where: str) -> None:
    found = getattr(saved, "shape", None)
    if found != value.shape:
        raise ValueError(
            f"{where} to have the shape {tuple(value.shape)}, got "
            f"{None if found is None else tuple(found)}."
        )
    if saved.is_complex() and not value.is_complex():
        raise ValueError(f"{where} to be real like the model's, got {saved.dtype}.")


def _kept_model(model: nn.Module) -> Callable[[], None]:
    """Copies a model's state to the CPU and returns a function that restores the state.

    The function does not call the model's load_state_dict(), which may be user-defined and fail.
    """
    kept = {
        name: value.detach().to("cpu", copy=True)
        if isinstance(value, Tensor)
        else copy.deepcopy(value)
        for name, value in model.state_dict().items()
    }

    def restore() -> None:
        own = model.state_dict()
        for name, value in kept.items():
            if isinstance(value, Tensor):
                own[name].copy_(value)
        for name, value in kept.items():
            if not isinstance(value, Tensor):
                model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)

    return restore


# --- Sharded states -------------------------------------------------------------------------------


def _inner(part: Any) -> Any:
    """Returns the optimizer inside LARC, or `part` if `part` is not LARC."""
    return part.optim if isinstance(part, LARC) else part


def _zeros(parts: Mapping[str, Stateful]) -> Iterator[tuple[str, Any]]:
    """Yields each ZeroRedundancyOptimizer among the parts, with or without LARC around it."""
    for name, part in parts.items():
        if _is_zero(inner := _inner(part)):
            yield name, inner


def _check_group(zero: Any, name: str, group: ProcessGroup | None) -> None:
    """Checks that `group` contains all ranks of a ZeroRedundancyOptimizer."""
    ranks = set(get_process_group_ranks(zero.process_group))
    if not ranks <= ({get_rank()} if group is None else set(get_process_group_ranks(group))):
        raise ValueError(
            f"save_checkpoint: expected group to contain the {len(ranks)} ranks that share the "
            f"states of {name!r}, a ZeroRedundancyOptimizer, got "
            f"{'None' if group is None else 'another group'}. Call save_checkpoint(..., group=...) "
            "on all of these ranks."
        )
    # If state_dict() raises, all ranks must raise here. In the gather, an exception on one rank
    # would leave the other ranks waiting.
    zero.optim.state_dict()


def _gathered_state(zero: Any, group: ProcessGroup | None) -> dict[str, Any] | None:
    """Gathers the full state dict on the group's rank 0, on the CPU; returns None elsewhere.

    A collective for all ranks of the optimizer, after _check_group().
    """
    ranks = get_process_group_ranks(zero.process_group)
    saver = get_rank() if group is None else get_process_group_ranks(group)[0]
    zero.consolidate_state_dict(to=ranks.index(saver) if saver in ranks else 0)
    if get_rank() != saver:
        return None
    whole: dict[str, Any] = zero.state_dict()
    options = _step_options(zero)
    whole["param_groups"] = [{**group, **options} for group in whole["param_groups"]]
    vars(zero)["_all_state_dicts"].clear()  # frees the gathered states of the other ranks
    return whole


def _step_options(zero: Any) -> dict[str, Any]:
    """Returns the local optimizer's step options, which param_groups do not contain."""
    return saved_options(zero.optim) if isinstance(zero.optim, FusedOptimizer) else {}


def check_shared(parts: Mapping[str, Stateful], group: ProcessGroup | None) -> None:
    """Checks that one file from `group` can contain every part's complete state.

    Pipeline stages have different parameters in each process, but rank 0 only saves its own.
    """
    for name, zero in _zeros(parts):
        _check_group(zero, name, group)
    ranks = set() if group is None else set(get_process_group_ranks(group))
    for name, part in parts.items():
        inner = _inner(part)
        if isinstance(inner, FusedOptimizer) and inner.norm_groups.ranks & ranks:
            raise ValueError(
                f"save_checkpoint: expected all ranks of group to have the same parameters, got "
                f"{name!r} with norm_groups that contain other ranks of group, as for pipeline "
                "stages. Save one file for each stage, with a group of the stage's ranks."
            )


def gathered_states(parts: Mapping[str, Stateful], group: ProcessGroup | None) -> dict[str, Any]:
    """Gathers the full states of sharded parts on rank 0; a collective."""
    states = {name: _gathered_state(zero, group) for name, zero in _zeros(parts)}
    return {name: state for name, state in states.items() if state is not None}


# --- Loading --------------------------------------------------------------------------------------


def load_part(part: Stateful, saved: Any, refused: str) -> Callable[[], None]:
    """Loads a part and returns a function that restores the part's previous state.

    If the part's load_state_dict() raises, the previous state is restored, and the error's message
    begins with `refused`.
    """
    restore = _kept(part)
    try:
        _load(part, saved)
    except Exception as error:
        # The text of a KeyError is only the key.
        said = f"it lacks the key {error}" if isinstance(error, KeyError) else error
        message = f"{refused}: {said}"
        try:
            restore()
        except Exception as second:  # load_state_dict() also raises for the part's own state
            message = f"{message} It could not be restored: {second}"
        raise ValueError(message) from error
    return restore


def _load(part: Any, saved: Any) -> None:
    if _is_zero(inner := _inner(part)):
        _load_zero(inner, saved)
    elif isinstance(part, LRScheduler):
        part.load_state_dict(_with_counters(part, saved))
    else:
        part.load_state_dict(saved)


def _load_zero(zero: Any, saved: Any) -> None:
    """Loads this rank's states and all options from a full state dict, or raises and loads none.

    zero.load_state_dict() would store tensors without checks and keep a second copy of the states.
    """
    where = "ZeroRedundancyOptimizer.load_state_dict: expected"
    check_structure(where, zero.param_groups, saved)
    local: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, own, of_file in zip(
        zero.param_groups, zero.optim.param_groups, saved["param_groups"], strict=True
    ):
        keys = dict(zip(group["params"], of_file["params"], strict=True))
        own_keys = [keys[param] for param in own["params"]]
        options = {key: value for key, value in of_file.items() if key != "param_names"}
        local["param_groups"].append({**options, "params": own_keys})
        local["state"] |= {key: saved["state"][key] for key in own_keys if key in saved["state"]}
    zero.optim.load_state_dict(local)
    options = _step_options(zero)
    for group, own in zip(zero.param_groups, zero.optim.param_groups, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
        # Step options that were passed to ZeroRedundancyOptimizer are in zero's groups too, and
        # zero.step() copies the groups' values to the local optimizer.
        group.update({key: value for key, value in options.items() if key in group})


def _with_counters(scheduler: LRScheduler, saved: Any) -> Any:
    """Converts dicts in a scheduler's state to Counters where needed: C++ writes plain dicts."""
    if not isinstance(saved, Mapping):
        return saved
    state = dict(saved)
    for name, value in saved.items():
        if isinstance(getattr(scheduler, name, None), Counter) and isinstance(value, Mapping):
            state[name] = Counter(value)
    inside = getattr(scheduler, "_schedulers", None)
    states = saved.get("_schedulers")
    if inside and isinstance(states, list | tuple) and len(states) == len(inside):
        state["_schedulers"] = [*map(_with_counters, inside, states)]
    return state


def _kept(part: Any) -> Callable[[], None]:
    """Returns a function that restores a part.

    Loading the previous state_dict() would not be enough, because loading keeps what the state dict
    lacks: averages and masters in fused optimizers, and attributes of schedulers.
    """
    if isinstance(part, nn.Module):
        return _kept_model(part)
    if isinstance(part, LARC):
        return _kept(part.optim)
    if _is_zero(part):
        return _kept_zero(part)
    if isinstance(part, ResumableSampler):
        return part.keep()
    load = getattr(part.load_state_dict, "__func__", None)
    if load in (Optimizer.load_state_dict, FusedOptimizer.load_state_dict):
        # Loading replaces the optimizer's states and groups, so references to the old ones suffice.
        own = {key: getattr(part, key) for key in ("defaults", "state", "param_groups")}
        return lambda: part.__setstate__(own)
    before = part.state_dict()
    if not isinstance(part, Optimizer):
        before = copy.deepcopy(before)
    known = [(scheduler, set(vars(scheduler))) for scheduler in _schedulers(part)]

    def restore() -> None:
        part.load_state_dict(before)
        for scheduler, names in known:
            for name in set(vars(scheduler)) - names:
                delattr(scheduler, name)

    return restore


def _kept_zero(zero: Any) -> Callable[[], None]:
    """Returns a function that restores a ZeroRedundancyOptimizer."""
    restore_local = _kept(zero.optim)
    options = [dict(group) for group in zero.param_groups]

    def restore() -> None:
        restore_local()
        for group, before in zip(zero.param_groups, options, strict=True):
            group.clear()
            group.update(before)

    return restore


def _schedulers(part: Any) -> Iterator[LRScheduler]:
    """Yields a scheduler and all schedulers nested inside it."""
    if isinstance(part, LRScheduler):
        yield part
        for inside in getattr(part, "_schedulers", ()):
            yield from _schedulers(inside)
