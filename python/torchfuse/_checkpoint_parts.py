# SPDX-License-Identifier: BSD-3-Clause
"""The objects of a checkpoint: their classes, and loading that can be taken back."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from torchfuse._checkpoint_zero import check_group, gathered_state, is_zero, kept_zero, load_zero
from torchfuse._shown import shown
from torchfuse.optimizers import FusedOptimizer
from torchfuse.parallel import LARC, DistributedDataParallel
from torchfuse.resumable_sampler import ResumableSampler


class Stateful(Protocol):
    """An object that a checkpoint can hold."""

    def state_dict(self) -> Any:
        """Returns the state: plain values and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Loads the state: all of it or, after an exception, nothing."""


# --- Classes --------------------------------------------------------------------------------------


def class_name(part: Any) -> str | None:
    """Returns the class that a file names: of ours or torch's, the nearest of an object's bases."""
    if isinstance(part, LARC) or is_zero(part):
        return class_name(part.optim)
    if not isinstance(part, LRScheduler | Optimizer):
        return None
    known = (kind.__name__ for kind in type(part).__mro__ if _is_known(kind))
    return next((name for name in known if name not in ("LRScheduler", "Optimizer")), None)


def check_class(part: Stateful, name: str, saved: Any, where: str) -> None:
    """Checks that a part is of the class that the file names, if it names one."""
    own = class_name(part)
    written = saved.get(name) if isinstance(saved, Mapping) else None
    if None not in (own, written) and own != written:
        other = shown(written).strip("'")
        raise ValueError(
            f"{where} to hold the state of {own} as {name!r}, got that of {other}. Load it into a "
            f"{other}, or leave {name!r} out and begin with a fresh {own}."
        )


def check_schedulers(caller: str, parts: Mapping[str, Stateful]) -> None:
    """Checks that the optimizer of each scheduler is among the parts.

    With the epoch of a scheduler and other rates than its optimizer had, a run would go on with
    wrong rates. Any other object may hold the scheduler's optimizer, as FP16_Optimizer and
    accelerate's optimizers do: nothing is checked then.
    """
    inner: list[Any] = [part.optim if isinstance(part, LARC) else part for part in parts.values()]
    optimizers = [part.optim if is_zero(part) else part for part in inner]
    known = (LRScheduler, nn.Module, GradScaler, Sampler)
    if not all(_is_optimizer(part) or isinstance(part, known) for part in inner):
        return
    for name, part in parts.items():
        own = getattr(part, "optimizer", None) if isinstance(part, LRScheduler) else None
        if _is_optimizer(own) and all(own is not other for other in [*inner, *optimizers]):
            raise ValueError(
                f"{caller}: expected {name!r} to be the scheduler of an optimizer in the "
                f"checkpoint, got that of a {type(own).__name__} that is not in it. Add this "
                "optimizer, or build the scheduler for one that is."
            )


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(("torchfuse.", "torch.optim."))


def _is_optimizer(part: Any) -> bool:
    """Whether a part is an optimizer of ours or torch's, and not a wrapper of one."""
    inner = part.optim if is_zero(part) else part
    return isinstance(inner, FusedOptimizer) or (
        isinstance(inner, Optimizer) and _is_known(type(inner))
    )


def _compiled_modules() -> tuple[type, ...]:
    """Returns the class that torch.compile(module) returns, if anything was compiled."""
    found = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return () if found is None else (found,)


def unwrapped(part: Any) -> Any:
    """Returns the module in DistributedDataParallel and torch.compile, and anything else as is."""
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
    """Returns the names in a model's state dict, by those without what torch.compile adds."""
    prefixes = [
        f"{name}._orig_mod."
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _compiled_modules())
    ]
    names = {}
    for name in model.state_dict():
        plain = name
        if not isinstance(name, str):  # of a state_dict() of the program's own
            names[name] = name
            continue
        for prefix in reversed(prefixes):  # inner ones first
            if plain.startswith(prefix):
                plain = prefix.removesuffix("_orig_mod.") + plain.removeprefix(prefix)
        names[plain] = name
    return names


def state_of(part: Stateful) -> Any:
    """Returns a part's state dict; of a model, under the names that it has when not compiled."""
    state = part.state_dict()
    if not isinstance(part, nn.Module):
        return state
    return {plain: state[name] for plain, name in _own_names(part).items()}


def in_own_names(model: nn.Module, saved: Any) -> Any:
    """Returns a model's saved state under the names that the model has."""
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
    """Checks names, shapes and kinds; the program's own modules may refuse more."""
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
    """Checks that a tensor of a model can be written."""
    if is_lazy(value):
        raise ValueError(f"{where} with a shape, got a lazy one. Run the model once.")
    if value.is_meta:
        raise ValueError(f"{where} with memory, got one on meta. Call model.to_empty(device=...).")
    if value.is_inference():
        raise ValueError(
            f"{where} that was made outside of inference mode, got one of it. Build the model "
            "outside."
        )
    if any(
        size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        raise ValueError(f"{where} with memory for each element, got an expanded one. Clone it.")


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
    """Copies a model's state to the CPU and returns what puts it back without the model's code."""
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


# --- States that processes share ------------------------------------------------------------------


def _inner(part: Any) -> Any:
    """Returns the optimizer in LARC, and anything else as is."""
    return part.optim if isinstance(part, LARC) else part


def _zeros(parts: Mapping[str, Stateful]) -> Iterator[tuple[str, Any]]:
    """Yields the ZeroRedundancyOptimizers among the parts, also those inside LARC."""
    for name, part in parts.items():
        if is_zero(inner := _inner(part)):
            yield name, inner


def check_shared(parts: Mapping[str, Stateful], group: ProcessGroup | None) -> None:
    """Checks that `group` can save the parts whose states processes share.

    Of a pipeline's stages, which have other parameters in each process, rank 0 would save its own.
    """
    for name, zero in _zeros(parts):
        check_group(zero, name, group)
    ranks = set() if group is None else set(get_process_group_ranks(group))
    for name, part in parts.items():
        inner = _inner(part)
        if isinstance(inner, FusedOptimizer) and inner.norm_groups.ranks & ranks:
            raise ValueError(
                f"save_checkpoint: expected the processes of group to have the same parameters, "
                f"got norm_groups of {name!r} with other ranks of it, as stages of a pipeline "
                "have. Save a file for each stage, with a group of the ranks that have the same."
            )


def gathered_states(parts: Mapping[str, Stateful], group: ProcessGroup | None) -> dict[str, Any]:
    """Returns whole states of the parts whose states processes share, on rank 0; a collective."""
    states = {name: gathered_state(zero, group) for name, zero in _zeros(parts)}
    return {name: state for name, state in states.items() if state is not None}


# --- Loading --------------------------------------------------------------------------------------


def load_part(part: Stateful, saved: Any, refused: str) -> Callable[[], None]:
    """Loads a part and returns what restores it; after an error it is restored.

    `refused` begins the message for a state that the part refuses.
    """
    restore = _kept(part)
    try:
        _load(part, saved)
    except Exception as error:
        # A KeyError says the key alone.
        said = f"it lacks the key {error}" if isinstance(error, KeyError) else error
        message = f"{refused}: {said}"
        try:
            restore()
        except Exception as second:  # the part refuses its own state too
            message = f"{message} It could not be restored: {second}"
        raise ValueError(message) from error
    return restore


def _load(part: Any, saved: Any) -> None:
    if is_zero(inner := _inner(part)):
        load_zero(inner, saved)
    elif isinstance(part, LRScheduler):
        part.load_state_dict(_with_counters(part, saved))
    else:
        part.load_state_dict(saved)


def _with_counters(scheduler: LRScheduler, saved: Any) -> Any:
    """Returns a scheduler's state with Counters where C++, which has none, wrote plain dicts."""
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
    """Returns what restores a part.

    Loading the state from before is not enough where loading keeps what a state lacks: fused
    optimizers keep averages and masters, and schedulers all attributes.
    """
    if isinstance(part, nn.Module):
        return _kept_model(part)
    if isinstance(part, LARC):
        return _kept(part.optim)
    if is_zero(part):
        return kept_zero(part, _kept)
    if isinstance(part, ResumableSampler):
        return part.keep()
    load = getattr(part.load_state_dict, "__func__", None)
    if load in (Optimizer.load_state_dict, FusedOptimizer.load_state_dict):
        # Optimizers replace their states and groups and do not write to the old ones.
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


def _schedulers(part: Any) -> Iterator[LRScheduler]:
    """Yields a scheduler and those inside it."""
    if isinstance(part, LRScheduler):
        yield part
        for inside in getattr(part, "_schedulers", ()):
            yield from _schedulers(inside)
