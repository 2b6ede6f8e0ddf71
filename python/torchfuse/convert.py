# SPDX-License-Identifier: BSD-3-Clause
"""State dicts in the layouts of apex.optimizers.

Other checkpoints need no conversion. torchfuse's optimizers load apex's and torch.optim's state
dicts. torch.optim's optimizers load torchfuse's state dicts. C++ programs read the files that
`save_checkpoint` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchfuse.optimizers import FusedOptimizer

__all__ = ["to_apex_state_dict"]

_FP16_AND_32 = (torch.float16, torch.float32)
_ADAM_OPTIONS = ("lr", "bias_correction", "betas", "eps", "weight_decay")
_LAMB_OPTIONS = (*_ADAM_OPTIONS, "grad_averaging", "max_grad_norm")

# Options that change the update and that apex's classes lack.
_UNKNOWN_TO_APEX = ("amsgrad", "lr_decay", "maximize", "trust_ratio_bounds")


@dataclass(frozen=True)
class _Layout:
    """The layout of apex's state dict for one class.

    Attributes:
        states: Keys of each parameter's state.
        options: Keys of each group.
        counts_steps: Whether each group stores a step count.
        norms: torchfuse state with one number per parameter. apex's group stores these numbers in
            two vectors under `exp_avg_sq`, one for fp16 and one for fp32 parameters.
        fp32_states: Whether states are always fp32 rather than in the parameter's dtype.
        device_scalars: Whether `lr` and `step` are tensors.
        dtypes: Parameter dtypes that the class supports.
    """

    states: tuple[str, ...]
    options: tuple[str, ...]
    counts_steps: bool = True
    norms: str | None = None
    fp32_states: bool = False
    device_scalars: bool = False
    dtypes: tuple[torch.dtype, ...] = _FP16_AND_32


_LAYOUTS = {
    "FusedAdam": _Layout(
        states=("exp_avg", "exp_avg_sq"),
        options=_ADAM_OPTIONS,
        fp32_states=True,
        dtypes=(*_FP16_AND_32, torch.bfloat16),
    ),
    "FusedLAMB": _Layout(states=("exp_avg", "exp_avg_sq"), options=_LAMB_OPTIONS),
    "FusedMixedPrecisionLamb": _Layout(
        states=("exp_avg", "exp_avg_sq"),
        options=_LAMB_OPTIONS,
        device_scalars=True,
        dtypes=(*_FP16_AND_32, torch.bfloat16),
    ),
    "FusedSGD": _Layout(
        states=("momentum_buffer",),
        options=("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        counts_steps=False,
    ),
    "FusedNovoGrad": _Layout(
        states=("exp_avg",),
        options=(*_ADAM_OPTIONS, "grad_averaging", "norm_type", "init_zero"),
        norms="exp_avg_norm",
    ),
    "FusedAdagrad": _Layout(
        states=("sum",), options=("lr", "eps", "weight_decay"), counts_steps=False
    ),
}


def to_apex_state_dict(optimizer: FusedOptimizer) -> dict[str, Any]:
    """Returns an optimizer's state in the layout of apex's class with the same name.

    The layout differs from ``state_dict()`` as follows:

    - Steps are counted per group, not per parameter.
    - `adam_w_mode`, `use_nvlamb`, `reg_inside_moment` and `wd_after_momentum` are not saved. Pass
      the same values to apex's constructor.
    - Masters are not saved. A resumed apex run creates masters from the parameters.
    - Moments have the parameter's dtype, so fp32 moments of 16-bit parameters are rounded.
      FusedAdam, and FusedMixedPrecisionLamb for `reduced_precision_dtype`, keep fp32 moments.
    - `write_back_grads`, `skip_non_finite`, `set_grad_none` and, except for LAMB, `max_grad_norm`
      are not saved.

    To convert in the other direction, call `load_state_dict` of a torchfuse optimizer.

    Args:
        optimizer (FusedOptimizer): FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedSGD,
            FusedNovoGrad, FusedAdagrad or an instance of a subclass.

    Returns:
        A dictionary with ``state``, the states of each parameter that has stepped, and
        ``param_groups``, the hyper-parameters as numbers. Groups that have stepped contain an int
        ``step`` if apex's class counts steps. In FusedMixedPrecisionLamb ``lr`` is a 0-dim fp32
        tensor and ``step`` an int32 tensor of shape [1]. In FusedNovoGrad each group contains
        ``exp_avg_sq``: one fp32 vector with the norms of fp16 parameters and one for fp32. Tensors
        whose dtype does not change share memory with the optimizer, as in ``state_dict()``.

    Raises:
        ValueError: If apex cannot represent the state: different step counts in one group,
            `amsgrad`, `maximize`, `lr_decay`, `trust_ratio_bounds`, LAMB without `max_grad_norm`,
            or a parameter dtype that apex's class does not support. The message names the group.
        TypeError: If apex has no such class.

    Example:
        >>> import torch
        >>> from torchfuse.convert import to_apex_state_dict
        >>> from torchfuse.optimizers import FusedAdam
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> param.grad = torch.ones(2)
        >>> optimizer = FusedAdam([param])
        >>> optimizer.step()
        >>> to_apex_state_dict(optimizer)["param_groups"][0]["step"]
        1
    """
    layout = _layout_of(optimizer)
    packed = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    groups: list[dict[str, Any]] = []
    for index, (own_group, saved) in enumerate(
        zip(optimizer.param_groups, packed["param_groups"], strict=True)
    ):
        group = {**saved, **own_group}  # with the options of the step
        where = f"to_apex_state_dict: expected group {index} of {type(optimizer).__name__}"
        _check_group(layout, group, where)
        # apex has no states either for parameters that have not stepped.
        states = {
            key: (param, packed["state"][key])
            for key, param in zip(saved["params"], group["params"], strict=True)
            if packed["state"].get(key)
        }
        for key, (param, own) in states.items():
            dtype = _state_dtype(layout, optimizer, param)
            state[key] = {
                # SGD's buffer is None until the first update, and apex has no buffer until then.
                name: own[name].to(dtype)
                for name in layout.states
                if own.get(name) is not None
            }
        exported = {key: _number(group[key]) for key in layout.options}
        if layout.counts_steps and states:
            exported["step"] = _common_step([own["step"] for _, own in states.values()], where)
        if layout.norms is not None and states:
            exported["exp_avg_sq"] = _norms(layout.norms, states.values())
        if layout.device_scalars:
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            step = exported.get("step", 0)
            exported["lr"] = torch.tensor(exported["lr"], dtype=torch.float32, device=device)
            exported["step"] = torch.tensor([step], dtype=torch.int32, device=device)
        groups.append({**exported, "params": list(saved["params"])})
    return {"state": state, "param_groups": groups}


def _layout_of(optimizer: FusedOptimizer) -> _Layout:
    for kind in type(optimizer).__mro__:
        # A user's class may have the same name as a class of torchfuse.
        if kind.__name__ in _LAYOUTS and kind.__module__.startswith("torchfuse."):
            return _LAYOUTS[kind.__name__]
    raise TypeError(
        f"to_apex_state_dict: expected an optimizer class that apex has too "
        f"({', '.join(_LAYOUTS)}), got {type(optimizer).__name__}."
    )


def _check_group(layout: _Layout, group: Mapping[str, Any], where: str) -> None:
    for key in _UNKNOWN_TO_APEX:
        if group.get(key):
            raise ValueError(
                f"{where} to have no {key}, because apex does not support it, got {group[key]!r}."
            )
    if "max_grad_norm" in layout.options and group["max_grad_norm"] is None:
        raise ValueError(
            f"{where} to have a max_grad_norm, because apex's class always clips, got None. To "
            "disable clipping in apex, set max_grad_norm to a huge number."
        )
    for index, param in enumerate(group["params"]):
        if param.requires_grad and param.dtype not in layout.dtypes:
            dtypes = ", ".join(map(str, layout.dtypes))
            raise ValueError(
                f"{where} to have only parameters of {dtypes}, the dtypes that apex's class "
                f"supports, got {param.dtype} for params[{index}]."
            )


def _state_dtype(layout: _Layout, optimizer: FusedOptimizer, param: Tensor) -> torch.dtype:
    reduced = getattr(optimizer, "reduced_precision_dtype", None)
    if layout.fp32_states or (layout.device_scalars and param.dtype == reduced):
        return torch.float32
    return param.dtype


def _common_step(steps: Sequence[Any], where: str) -> int:
    counts = sorted({int(step) for step in steps})
    if len(counts) > 1:
        raise ValueError(
            f"{where} to have one step count, because apex counts steps per group, got "
            f"{', '.join(map(str, counts))}. Put parameters that started later into another group."
        )
    return counts[0]


def _norms(name: str, states: Any) -> list[Tensor]:
    """Returns two vectors with one number per parameter, for fp16 and fp32 parameters."""
    vectors = []
    for dtype in _FP16_AND_32:
        numbers = [own[name].float().reshape(()) for param, own in states if param.dtype == dtype]
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        vectors.append(torch.stack(numbers) if numbers else none)
    return vectors


def _number(value: Any) -> Any:
    """Returns a hyper-parameter, which may be a tensor or pair, as a number or pair of numbers."""
    if isinstance(value, tuple | list):
        return tuple(_number(element) for element in value)
    return value.item() if isinstance(value, Tensor) else value


def __getattr__(name: str) -> NoReturn:
    """Raises an error that names save_checkpoint if a program looks for file converters here."""
    if name.startswith(("read_", "write_", "convert_")):
        # `from torchfuse.convert import ...` replaces an AttributeError's message.
        raise ImportError(
            f"torchfuse.convert.{name}: expected to_apex_state_dict, the only function in this "
            "module. Use torchfuse.save_checkpoint and load_checkpoint: Python and C++ read the "
            "same file."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
