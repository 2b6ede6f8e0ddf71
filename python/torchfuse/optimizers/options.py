# SPDX-License-Identifier: BSD-3-Clause
"""Options that every fused optimizer supports, per step and per parameter group.

Note [Options of the step]
An option that applies to the whole step is an attribute of the optimizer and is checked when set.
The value is stored in `optimizer.defaults`, which copies, pickles and programs that construct a
second optimizer include. Groups do not store step options, and a step raises if a group contains
another value. `state_dict()` writes step options into every saved group, and `load_state_dict()`
reads the first group, because torch.distributed's checkpoints, FSDP1 and ZeroRedundancyOptimizer
only save groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from numbers import Integral, Real
from typing import Any, Generic, Literal, TypedDict, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from torchfuse._shown import shown

#: Choices for the gradients that a step stores in `.grad`. True means "clipped".
WriteBackGrads = bool | Literal["unscaled", "clipped"]

#: Group keys that select among torch.optim's implementations, with the values that torch's classes
#: expect. torchfuse ignores these keys.
TORCH_ONLY: Mapping[str, Any] = {"foreach": None, "fused": None, "differentiable": False}

HALF_DTYPES = (torch.float16, torch.bfloat16)


class BasicOptions(TypedDict, total=False):
    """Keyword-only options of every fused optimizer, documented in `FusedAdam`."""

    write_back_grads: WriteBackGrads | None
    skip_non_finite: bool
    skip_norm_above: float | Tensor | None
    state_dtype: torch.dtype | None
    store_param_remainders: bool
    master_weight_dtype: torch.dtype
    stochastic_rounding: bool
    seed: int
    ema_decay: float | None
    ema_warmup: bool
    ema_start_step: int
    norm_groups: Sequence[dist.ProcessGroup | dist.device_mesh.DeviceMesh] | None
    fused: bool | None
    foreach: bool | None
    differentiable: bool | None


class MasterOptions(BasicOptions, total=False):
    """`BasicOptions` for classes whose `master_weights` is keyword-only."""

    master_weights: bool


class CommonOptions(MasterOptions, total=False):
    """`MasterOptions` for classes whose `max_grad_norm` is keyword-only."""

    max_grad_norm: float | None


class StepOptions(CommonOptions, total=False):
    """`CommonOptions` for classes whose `set_grad_none` is keyword-only."""

    set_grad_none: bool


#: Default values of group options and of step options.
GROUP_OPTIONS: Mapping[str, Any] = {
    "master_weights": False,
    "state_dtype": None,
    "store_param_remainders": False,
    "stochastic_rounding": False,
}
STEP_OPTIONS: Mapping[str, Any] = {
    "set_grad_none": True,
    "max_grad_norm": None,
    "skip_norm_above": None,
    "write_back_grads": None,
    "skip_non_finite": False,
    "seed": 0,
    "ema_decay": None,
    "ema_warmup": False,
    "ema_start_step": 0,
    "norm_groups": None,
}
#: Step options that checkpoints contain. Process groups cannot be saved.
SAVED_OPTIONS = tuple(key for key in STEP_OPTIONS if key != "norm_groups")


@dataclass
class ScalingRequest:
    """A torchfuse scaler's request for one step, stored in `optimizer._scaling` during the step.

    Every scaler also sets the optimizer's attributes `grad_scale` and `found_inf`, which hooks and
    user-defined steps read. torch's scaler sets only these attributes.

    Attributes:
        grad_scale: Loss scale of the gradients. None means 1.
        found_inf: A non-zero value skips the step. With `check`, the step sets the value.
        check: Look for non-finite gradients inside the step.
        found_inf_is_output: Let the step overwrite `found_inf` with 1 or 0. The step then resets
            this flag to False.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    check: bool = False
    found_inf_is_output: bool = False


T = TypeVar("T")


class StepOption(Generic[T]):
    """Descriptor for an option of the whole step; see Note [Options of the step]."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, optimizer: None, owner: type) -> Self: ...

    @overload
    def __get__(self, optimizer: torch.optim.Optimizer, owner: type) -> T: ...

    def __get__(self, optimizer: torch.optim.Optimizer | None, owner: type) -> Self | T:
        if optimizer is None:
            return self
        value: T = optimizer.defaults[self._name]
        return value

    def __set__(self, optimizer: torch.optim.Optimizer, value: Any) -> None:
        name = type(optimizer).__name__
        if "defaults" not in vars(optimizer):
            raise AttributeError(
                f"{name}: {self._name} was set before super().__init__() was called. Pass "
                f"{self._name} to super().__init__(), or set {self._name} afterwards."
            )
        checked = CHECKS[self._name](f"{name}: expected {self._name} to be", value)
        optimizer.defaults[self._name] = checked
        optimizer._checked_settings = ()  # type: ignore[attr-defined]  # check groups again


def group_option(key: str, kind: type[int], doc: str) -> Any:
    """Returns a property that reads the flag `key` of the first group and sets it in all groups."""

    def get(self: torch.optim.Optimizer) -> int:
        return kind(self.param_groups[0][key])

    def set_all(self: torch.optim.Optimizer, value: Any) -> None:
        for group in self.param_groups:
            group[key] = bool(value)

    get.__annotations__["return"] = kind  # for the documentation
    return property(get, set_all, doc=doc)


def decoupled_option(key: str) -> Any:
    """Returns a `group_option` for decoupled weight decay, an int as in apex's classes."""
    return group_option(
        key, int, "1 if the first group uses decoupled weight decay, 0 for L2 regularization."
    )


def is_flag(value: Any) -> bool:
    """Returns whether a value is a bool, a NumPy bool, or 0 or 1 as in apex."""
    is_bool = type(value).__name__ in ("bool", "bool_")  # NumPy's is not an Integral
    return is_bool or (isinstance(value, Integral) and value in (0, 1))


def as_float(where: str, value: Any) -> float:
    """Returns a number as a float; raises ValueError, with a message that begins with `where`."""
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} a number that a float can hold: {error}.") from None


def checked_flag(where: str, value: Any) -> bool:
    """Returns a step option's flag as a bool."""
    if not is_flag(value):
        raise TypeError(f"{where} a bool, got {shown(value)}. Set it to True or False.")
    return bool(value)


def checked_write_back(where: str, value: Any) -> WriteBackGrads:
    """Returns a valid `write_back_grads`."""
    if isinstance(value, str) and value in ("unscaled", "clipped"):
        return "unscaled" if value == "unscaled" else "clipped"
    if value is None or is_flag(value):
        return bool(value)
    raise TypeError(f"{where} a bool, 'unscaled' or 'clipped', got {shown(value)}.")


def checked_number(where: str, value: Any, high: float = math.inf) -> float | None:
    """Returns None or a number in [0, high); also infinity if `high` is infinite."""
    if value is None:
        return None
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{where} None or a number, got {type(value).__name__}.")
    number = as_float(where, value)
    if not (0.0 <= number < high or number == high == math.inf):
        below = "" if high == math.inf else f" and less than {high:g}"
        raise ValueError(f"{where} None or at least 0{below}, got {number}.")
    return number


def checked_threshold(where: str, value: Any) -> float | Tensor | None:
    """Returns None, a number of at least 0, or a 1-element tensor whose value is not read."""
    if not isinstance(value, Tensor):
        return checked_number(where, value)
    strided = value.layout == torch.strided and not (value.is_meta or value.is_nested)
    if not strided or value.numel() != 1 or not value.is_floating_point():
        shape = "" if value.is_nested else f" of shape {list(value.shape)}"
        raise ValueError(
            f"{where} None, a number or a 1-element tensor of a floating dtype, got a "
            f"{value.dtype} tensor{shape} on {value.device}."
        )
    return value.detach() if value.requires_grad else value


def checked_whole(where: str, value: Any) -> int:
    """Returns an integer in the kernels' range."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{where} an int, got {type(value).__name__}.")
    if not 0 <= value < 2**63:
        raise ValueError(f"{where} at least 0 and less than 2^63, got {value}.")
    return value


def checked_options(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a new optimizer's common options, with defaults for missing ones.

    Args:
        kind: The optimizer's class.
        given: Keyword arguments that the class itself does not define.

    Raises:
        TypeError: If no class defines an argument, or if a value has the wrong type.
        ValueError: If a value is out of range.
    """
    name, defaults = kind.__name__, {**GROUP_OPTIONS, **STEP_OPTIONS}
    for key in given:
        if key not in (*defaults, *TORCH_ONLY, "master_weight_dtype"):
            hint = _similar_argument(key, kind)
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}{hint}")
    check_master_dtype(name, 0, given.get("master_weight_dtype", torch.float32))
    check_torch_only(name, 0, given)
    found = {key: given.get(key, default) for key, default in defaults.items()}
    if found["write_back_grads"] is None:
        found["write_back_grads"] = kind._write_back_default  # type: ignore[attr-defined]
    for key in STEP_OPTIONS:
        found[key] = CHECKS[key](f"{name}: expected {key} to be", found[key])
    return found


def _similar_argument(name: str, kind: type) -> str:
    """Returns a message's "Did you mean" ending, or an empty string."""
    functions = (vars(cls)["__init__"] for cls in kind.__mro__ if "__init__" in vars(cls))
    known = {
        argument for function in functions for argument in inspect.signature(function).parameters
    }
    found = get_close_matches(name, sorted({*known, *GROUP_OPTIONS, *STEP_OPTIONS}), 1)
    return f". Did you mean {found[0]!r}?" if found else ""


_REMEDY = (
    "Pass groups that this process belongs to: [torch.distributed.new_group(ranks)], or "
    '[mesh["pp"]].'
)


@dataclass(frozen=True)
class NormGroups:
    """The process groups of `norm_groups` that contain other processes.

    Attributes:
        names: Group names, in reduction order.
        ranks: Global ranks of all other processes in the groups.
        device: Device type that the groups' backends support, for a process without parameters.
    """

    names: tuple[str, ...] = ()
    ranks: frozenset[int] = frozenset()
    device: str = "cpu"

    def __bool__(self) -> bool:
        return bool(self.names)

    @classmethod
    def of(cls, where: str, groups: Any) -> NormGroups:
        """Checks an optimizer's argument `norm_groups` and returns the groups.

        Args:
            where: Beginning of messages, such as "FusedAdam: expected norm_groups to be".
            groups: Process groups or 1-dimensional device meshes; None for no groups. A
                NormGroups, from another optimizer's defaults, is returned unchanged.

        Raises:
            TypeError: If `groups` is not a list or tuple, or if an entry is not a process group
                that this process belongs to.
            ValueError: If a mesh has several dimensions, or if groups share other processes.
        """
        if groups is None or isinstance(groups, NormGroups):
            return groups or cls()
        if not isinstance(groups, (list, tuple)):
            raise TypeError(
                f"{where} a list of process groups, got {type(groups).__name__}. {_REMEDY}"
            )
        owner = where.partition(":")[0]
        names: list[str] = []
        ranks: set[int] = set()
        device = "cpu"
        for index, entry in enumerate(groups):
            group = _group_of(owner, index, entry)
            others = _others(group)
            if others & ranks:
                raise ValueError(
                    f"{owner}: expected norm_groups[{index}] to share only this process with the "
                    f"preceding groups, got rank {min(others & ranks)} too, whose gradients would "
                    "count twice. Remove one of the groups."
                )
            if others:
                names.append(group.group_name)
                device = _device_type(group)
            ranks |= others
        return cls(tuple(names), frozenset(ranks), device)

    def check_counted_once(self, where: str, ranks: Collection[int]) -> None:
        """Raises ValueError if another process of `norm_groups` shares parameters with this one.

        Args:
            where: Beginning of the message, which names the shared parameter.
            ranks: Global ranks of the processes that hold shards or copies of the parameter.
        """
        twice = sorted(self.ranks.intersection(ranks))
        if twice:
            raise ValueError(
                f"{where} to be on no other process of norm_groups, got rank {twice[0]}, whose "
                "gradients would count twice. Remove the group: norm_groups are for processes with "
                "other parameters, and shards' norms are summed without norm_groups."
            )


def _group_of(owner: str, index: int, entry: Any) -> dist.ProcessGroup:
    where = f"{owner}: expected norm_groups[{index}] to be a process group"
    if not dist.is_available():
        raise TypeError(f"{where}, but torch was built without torch.distributed. Omit the group.")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(entry, DeviceMesh):
        if entry.ndim != 1:
            raise ValueError(
                f"{where} or a 1-dimensional mesh, got {entry.ndim} dimensions. Select the "
                'dimension whose processes have other parameters, such as mesh["pp"].'
            )
        if entry.get_coordinate() is not None:
            entry = entry.get_group()
    if not isinstance(entry, dist.ProcessGroup):
        raise TypeError(f"{where}, got {entry!r}. {_REMEDY}")
    return entry


def _others(group: dist.ProcessGroup) -> set[int]:
    return set(dist.get_process_group_ranks(group)) - {dist.get_rank()}


def _device_type(group: dist.ProcessGroup) -> str:
    """Returns the accelerator's device type if the group's backend supports it, else "cpu"."""
    backends = dist.get_backend_config(group)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    taken = accelerator is not None and f"{accelerator.type}:" in backends
    return accelerator.type if accelerator is not None and taken else "cpu"


#: Functions that check and convert a step option. The first argument begins the messages of
#: TypeError and ValueError.
CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "set_grad_none": checked_flag,
    "max_grad_norm": checked_number,
    "skip_norm_above": checked_threshold,
    "write_back_grads": checked_write_back,
    "skip_non_finite": checked_flag,
    "seed": checked_whole,
    "ema_decay": partial(checked_number, high=1.0),
    "ema_warmup": checked_flag,
    "ema_start_step": checked_whole,
    "norm_groups": NormGroups.of,
}


def take_step_options(optimizer: torch.optim.Optimizer, index: int, group: dict[str, Any]) -> None:
    """Removes step options from a group, after checking that their values are the optimizer's."""
    check_step_options(optimizer, type(optimizer).__name__, index, group)
    for key in SAVED_OPTIONS:
        group.pop(key, None)


def check_step_options(
    optimizer: torch.optim.Optimizer, caller: str, index: int, group: Mapping[str, Any]
) -> None:
    """Raises ValueError if a group's step option differs from the optimizer's."""
    if "norm_groups" in group:
        owner = type(optimizer).__name__
        raise ValueError(
            f"{caller}: expected norm_groups as an argument of the optimizer, got norm_groups in "
            f"group {index}. The norm covers all groups: pass norm_groups to {owner} itself. In "
            f"ZeroRedundancyOptimizer, pass optimizer_class=functools.partial({owner}, "
            "norm_groups=[group])."
        )
    for key in SAVED_OPTIONS:
        if key not in group or (key == "write_back_grads" and group[key] is None):
            continue
        where, own = f"{caller}: expected {key} of group {index} to be", optimizer.defaults[key]
        given = CHECKS[key](where, group[key])
        both = isinstance(given, Tensor) + isinstance(own, Tensor)
        if both == 1 or (both == 0 and given != own):
            raise ValueError(
                f"{where} {shown(own)}, as in the optimizer, got {shown(group[key])}. The option "
                f"applies to the whole step: set optimizer.{key}, or pass {key} to the constructor."
            )


def check_torch_only(owner: str, index: int, given: Mapping[str, Any]) -> None:
    """Raises ValueError if one of torch's implementation flags is set."""
    for key in TORCH_ONLY:
        if given.get(key):
            reason = (
                f"{owner}.step() has no derivative. Use a class of torch.optim."
                if key == "differentiable"
                else f"{owner} is always fused. Omit {key}."
            )
            raise ValueError(
                f"{owner}: expected {key} of group {index} to be False or None, "
                f"got {given[key]!r}. {reason}"
            )


def check_master_dtype(owner: str, index: int, dtype: Any) -> None:
    """Raises ValueError for TransformerEngine's master dtypes other than fp32."""
    if dtype is not torch.float32:
        raise ValueError(
            f"{owner}: expected master_weight_dtype of group {index} to be torch.float32, got "
            f"{dtype}. For bf16 parameters, store_param_remainders=True stores fp32 masters in 16 "
            "extra bits per element."
        )


def check_no_amsgrad(owner: str, amsgrad: bool) -> None:
    """Raises RuntimeError, as apex does, if an argument kept for apex's positions is True."""
    if amsgrad:
        raise RuntimeError(f"{owner}: expected amsgrad to be False, got {shown(amsgrad)}.")


def check_storage(
    caller: str, index: int, group: Mapping[str, Any], state_dtypes: Sequence[str]
) -> None:
    """Checks a group's storage options against the dtypes of the group's parameters."""
    for key in state_dtypes:
        _check_state_dtype(caller, index, key, group.get(key), group["params"])
    dtypes = {p: param.dtype for p, param in enumerate(group["params"]) if param.requires_grad}
    for key, masters, allowed in (
        ("store_param_remainders", True, (torch.bfloat16, torch.float32, torch.float64)),
        ("stochastic_rounding", False, (torch.bfloat16,)),
    ):
        if not group.get(key):
            continue
        if bool(group["master_weights"]) is not masters:
            raise ValueError(
                f"{caller}: expected master_weights of group {index} to be {masters} with {key}, "
                f"got {not masters}. {_WHY[key]}"
            )
        for place, dtype in dtypes.items():
            if dtype not in allowed:
                raise ValueError(
                    f"{caller}: expected params[{place}] of group {index} to be bf16 with {key}, "
                    f"got {dtype}. Set {key}=False in a separate group for other parameters."
                )
        if dtypes and torch.bfloat16 not in dtypes.values():
            raise ValueError(
                f"{caller}: expected group {index} to hold a bf16 parameter with {key}, got "
                f"{next(iter(dtypes.values()))}. Set {key}=False in this group."
            )


_WHY = {
    "store_param_remainders": "A remainder holds the bits of an fp32 master that bf16 cannot hold.",
    "stochastic_rounding": "Parameters with masters need no stochastic rounding: set only one.",
}


def _check_state_dtype(
    caller: str, group: int, name: str, dtype: Any, params: Sequence[Tensor]
) -> None:
    if dtype is None:
        return
    where = f"{caller}: expected {name} of group {group} to be"
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{where} None or a torch.dtype, got {type(dtype).__name__}.")
    for index, param in enumerate(params):
        if param.dtype == torch.float64:
            allowed, known = "torch.float64", dtype == torch.float64
        else:
            allowed = "torch.float32, torch.bfloat16 or torch.float16"
            known = dtype in (torch.float32, *HALF_DTYPES)
        if not known:
            raise ValueError(
                f"{where} None, {allowed} for params[{index}] of dtype {param.dtype}, got {dtype}."
            )


def as_tensor(value: float | Tensor, device: torch.device) -> Tensor:
    """Returns a hyper-parameter as a tensor on `device`, in fp64 for a number."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.tensor(value, dtype=torch.float64, device=device)
