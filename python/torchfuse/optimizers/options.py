# SPDX-License-Identifier: BSD-3-Clause
"""The options of every fused optimizer: those of the whole step, and those of a group.

Note [Options of the step]
What belongs to the whole step is an attribute of the optimizer, checked when it is set. It lies in
`optimizer.defaults`, which copies, pickles and programs that make a second optimizer take along.
Groups do not hold it: a step refuses a group that says something else. `state_dict()` writes it
into every saved group, and `load_state_dict()` reads the first, because torch.distributed's
checkpoints, FSDP1 and ZeroRedundancyOptimizer carry nothing but groups.
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

#: What a step stores in gradients. True stands for "clipped".
WriteBackGrads = bool | Literal["unscaled", "clipped"]

#: Keys of torch.optim's groups that choose among torch's implementations and have no meaning here,
#: with the values that torch's classes expect.
TORCH_ONLY: Mapping[str, Any] = {"foreach": None, "fused": None, "differentiable": False}

HALF_DTYPES = (torch.float16, torch.bfloat16)


class BasicOptions(TypedDict, total=False):
    """Options that every fused optimizer takes by keyword only, documented in `FusedAdam`."""

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
    """`BasicOptions` for classes that do not take `master_weights` by position."""

    master_weights: bool


class CommonOptions(MasterOptions, total=False):
    """`MasterOptions` for classes that do not take `max_grad_norm` by position."""

    max_grad_norm: float | None


class StepOptions(CommonOptions, total=False):
    """`CommonOptions` for classes that do not take `set_grad_none` by position."""

    set_grad_none: bool


#: Defaults of the options of groups, and of the step.
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
#: Those of the step that checkpoints hold: process groups are a program's own.
SAVED_OPTIONS = tuple(key for key in STEP_OPTIONS if key != "norm_groups")


@dataclass
class ScalingRequest:
    """What a scaler of torchfuse asks of one step: `optimizer._scaling` for as long as it takes.

    Hooks, and steps of a program's own, read the attributes `grad_scale` and `found_inf`, which
    every scaler sets. torch's scaler sets these alone.

    Attributes:
        grad_scale: loss scale of the gradients; None: 1.
        found_inf: non-zero skips the step; with `check`, the step sets it.
        check: look for non-finite gradients inside the step.
        found_inf_is_output: the step sets `found_inf` to 1 or 0 whatever it was, and this to False.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    check: bool = False
    found_inf_is_output: bool = False


T = TypeVar("T")


class StepOption(Generic[T]):
    """An option of the whole step: see Note [Options of the step].

    Args:
        doc: documentation of the attribute.
    """

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
                f"{name}: expected {self._name} to be set after super().__init__(), got it before. "
                "Pass it to super().__init__(), or set it afterwards."
            )
        checked = CHECKS[self._name](f"{name}: expected {self._name} to be", value)
        optimizer.defaults[self._name] = checked
        optimizer._checked_settings = ()  # type: ignore[attr-defined]  # groups may differ now


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
    """Returns a `group_option` for decoupled weight decay, a number as in apex's classes."""
    return group_option(
        key, int, "1 for decoupled weight decay, 0 for L2 regularization; of the first group."
    )


def is_flag(value: Any) -> bool:
    """Whether a value is a bool, also NumPy's, or 0 or 1 as in apex."""
    is_bool = type(value).__name__ in ("bool", "bool_")  # NumPy's is not an Integral
    return is_bool or (isinstance(value, Integral) and value in (0, 1))


def as_float(where: str, value: Any) -> float:
    """Returns a number as a float; the message of an error begins with `where`.

    Raises:
        ValueError: if it is too large, or not a number at all.
    """
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} a number that a float can hold: {error}.") from None


def checked_flag(where: str, value: Any) -> bool:
    """Returns a flag of the whole step as a bool."""
    if not is_flag(value):
        raise TypeError(f"{where} a bool, got {shown(value)}. Set it to True or False.")
    return bool(value)


def checked_write_back(where: str, value: Any) -> WriteBackGrads:
    """Returns what a step stores in gradients: a bool, "unscaled" or "clipped"."""
    if isinstance(value, str) and value in ("unscaled", "clipped"):
        return "unscaled" if value == "unscaled" else "clipped"
    if value is None or is_flag(value):
        return bool(value)
    raise TypeError(f"{where} a bool, 'unscaled' or 'clipped', got {shown(value)}.")


def checked_number(where: str, value: Any, high: float = math.inf) -> float | None:
    """Returns None or a number of at least 0 and less than `high`, which may be infinity itself."""
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
    """Returns None, a number of at least 0, or a 1-element tensor, whose value is not read."""
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
    """Returns a whole number in the range of the kernels."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{where} a whole number, got {type(value).__name__}.")
    if not 0 <= value < 2**63:
        raise ValueError(f"{where} at least 0 and less than 2^63, got {value}.")
    return value


def checked_options(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the common options of a new optimizer, with defaults for those that are missing.

    Args:
        kind: its class.
        given: arguments that the class itself does not have.

    Raises:
        TypeError: for an argument that no class has, and a value of the wrong type.
        ValueError: for a value out of range.
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
    """Returns the end of an error: the argument that may have been meant."""
    functions = (vars(cls)["__init__"] for cls in kind.__mro__ if "__init__" in vars(cls))
    known = {
        argument for function in functions for argument in inspect.signature(function).parameters
    }
    found = get_close_matches(name, sorted({*known, *GROUP_OPTIONS, *STEP_OPTIONS}), 1)
    return f". Did you mean {found[0]!r}?" if found else ""


_REMEDY = (
    "Give it groups that this process belongs to: [torch.distributed.new_group(ranks)], or "
    '[mesh["pp"]].'
)


@dataclass(frozen=True)
class NormGroups:
    """Groups of more than one process, as `norm_groups` names them.

    Attributes:
        names: of the groups, in the order of their reductions.
        ranks: of all other processes in them, among all processes.
        device: type of a device that they can send from, for a process without parameters.
    """

    names: tuple[str, ...] = ()
    ranks: frozenset[int] = frozenset()
    device: str = "cpu"

    def __bool__(self) -> bool:
        return bool(self.names)

    @classmethod
    def of(cls, where: str, groups: Any) -> NormGroups:
        """Checks the argument of an optimizer.

        Args:
            where: begins messages, as "FusedAdam: expected norm_groups to be".
            groups: process groups, or device meshes of one dimension. None: none. What this
                returned, as another optimizer's defaults hold it, is returned.

        Raises:
            TypeError: for what is no list or tuple, or has an entry that is no group of this
                process.
            ValueError: for a mesh of several dimensions, and for groups that share processes.
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
                    f"{owner}: expected norm_groups[{index}] to have no process in common with the "
                    f"groups before it but this one, got rank {min(others & ranks)} too, whose "
                    "gradients would count twice. Leave one of the groups out."
                )
            if others:
                names.append(group.group_name)
                device = _device_type(group)
            ranks |= others
        return cls(tuple(names), frozenset(ranks), device)

    def check_counted_once(self, where: str, ranks: Collection[int]) -> None:
        """Rejects processes that have parts or copies of the same parameters.

        Args:
            where: begins the message; what the processes share.
            ranks: of these processes, among all.
        """
        twice = sorted(self.ranks.intersection(ranks))
        if twice:
            raise ValueError(
                f"{where} to be on no process of norm_groups but this one, got rank {twice[0]} "
                "too, whose gradients would count twice. norm_groups are processes with other "
                "parameters; norms of parts are summed without it."
            )


def _group_of(owner: str, index: int, entry: Any) -> dist.ProcessGroup:
    where = f"{owner}: expected norm_groups[{index}] to be a process group"
    if not dist.is_available():
        raise TypeError(f"{where}, got one from a torch without torch.distributed. Omit it.")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(entry, DeviceMesh):
        if entry.ndim != 1:
            raise ValueError(
                f"{where} or a mesh of one dimension, got {entry.ndim} dimensions. Name the one "
                'whose processes have other parameters: mesh["pp"].'
            )
        if entry.get_coordinate() is not None:
            entry = entry.get_group()
    if not isinstance(entry, dist.ProcessGroup):
        raise TypeError(f"{where}, got {entry!r}. {_REMEDY}")
    return entry


def _others(group: dist.ProcessGroup) -> set[int]:
    return set(dist.get_process_group_ranks(group)) - {dist.get_rank()}


def _device_type(group: dist.ProcessGroup) -> str:
    """The device that programs with accelerators have parameters on, if the group takes it."""
    backends = dist.get_backend_config(group)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    taken = accelerator is not None and f"{accelerator.type}:" in backends
    return accelerator.type if accelerator is not None and taken else "cpu"


#: Each returns an option of the step as it is kept, or raises TypeError or ValueError; its first
#: argument begins the message.
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
    """Removes what a group says of the whole step, which must be what the optimizer has.

    Raises:
        ValueError: for another value, and for norm groups.
    """
    check_step_options(optimizer, type(optimizer).__name__, index, group)
    for key in SAVED_OPTIONS:
        group.pop(key, None)


def check_step_options(
    optimizer: torch.optim.Optimizer, caller: str, index: int, group: Mapping[str, Any]
) -> None:
    """Checks that a group says nothing else of the whole step than the optimizer."""
    if "norm_groups" in group:
        owner = type(optimizer).__name__
        raise ValueError(
            f"{caller}: expected norm_groups as an argument of the optimizer, got one in group "
            f"{index}. The norm is that of all groups: give it beside them. In "
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
                f"belongs to the whole step: set optimizer.{key}, or give the argument {key}."
            )


def check_torch_only(owner: str, index: int, given: Mapping[str, Any]) -> None:
    """Rejects torch's choices of an implementation, and of a differentiable step."""
    for key in TORCH_ONLY:
        if given.get(key):
            reason = (
                f"The step of {owner} has no derivative: use a class of torch.optim."
                if key == "differentiable"
                else f"{owner} is always fused: leave {key} out."
            )
            raise ValueError(
                f"{owner}: expected {key} of group {index} to be False or None, "
                f"got {given[key]!r}. {reason}"
            )


def check_master_dtype(owner: str, index: int, dtype: Any) -> None:
    """Rejects dtypes of masters other than fp32, which TransformerEngine supports."""
    if dtype is not torch.float32:
        raise ValueError(
            f"{owner}: expected master_weight_dtype of group {index} to be torch.float32, got "
            f"{dtype}. For bf16 parameters store_param_remainders=True keeps the same masters in "
            "16 bits each."
        )


def check_no_amsgrad(owner: str, amsgrad: bool) -> None:
    """Rejects True for amsgrad, which is accepted only for apex's positional order."""
    if amsgrad:
        raise RuntimeError(f"{owner}: expected amsgrad to be False, got {shown(amsgrad)}.")


def check_storage(
    caller: str, index: int, group: Mapping[str, Any], state_dtypes: Sequence[str]
) -> None:
    """Checks what decides which states there are, against the parameters of the group."""
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
                    f"got {dtype}. Set {key}=False in a group of its own for other parameters."
                )
        if dtypes and torch.bfloat16 not in dtypes.values():
            raise ValueError(
                f"{caller}: expected group {index} to hold a bf16 parameter with {key}, got "
                f"{next(iter(dtypes.values()))}. Set {key}=False in this group."
            )


_WHY = {
    "store_param_remainders": "A remainder is what a bf16 parameter lacks of its fp32 master.",
    "stochastic_rounding": "A parameter with a master loses nothing by rounding: choose one.",
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
    """Returns a hyper-parameter as a tensor, fp64 for a number, so that no digits are lost."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.tensor(value, dtype=torch.float64, device=device)
