# SPDX-License-Identifier: BSD-3-Clause
"""The gradient scaler's state: scale, counts, state dicts and pickling."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as _TorchGradScaler

from torchfuse import _C
from torchfuse._delegation import attribute_of
from torchfuse._shown import shown

#: Bounds for the scale. Within the bounds, the reciprocal is a normal fp32 number too.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

_STATE_TYPES = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}


class ScaleHistory(NamedTuple):
    """Loss scales of the last iterations, oldest first; returned by `GradScaler.scale_history`.

    Attributes:
        step: Index of each iteration, from 0.
        scale: Loss scale in each iteration.
        skipped: Whether each iteration skipped a step.

    Example:
        >>> import torch, torchfuse
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torchfuse.optimizers.FusedAdam([weight])
        >>> scaler = torchfuse.amp.GradScaler("cpu", init_scale=8.0, history_size=100)
        >>> scaler.scale(weight.sum() * float("inf")).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.scale_history()
        ScaleHistory(step=[0], scale=[8.0], skipped=[True])
    """

    step: list[int]
    scale: list[float]
    skipped: list[bool]


def check_positive(name: str, value: Any) -> None:
    """Checks that a scale or factor is positive; torch's constructor compares factors with 1."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(
            f"GradScaler: expected {name} to be positive and finite, got {shown(value)}."
        )


def check_scale(name: str, value: Any) -> None:
    """Checks that the scale and the scale's reciprocal are normal fp32 numbers."""
    check_positive(name, value)
    if not SMALLEST_SCALE <= float(value) <= LARGEST_SCALE:
        raise ValueError(
            f"GradScaler: expected {name} to be from 2^-126 to 2^126, so that the scale and its "
            f"reciprocal are normal fp32 numbers, got {shown(value)}."
        )


def check_count(name: str, value: Any, least: int) -> None:
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number < 2**63:
        raise ValueError(
            f"GradScaler: expected {name} to be a 64-bit int of at least {least}, got "
            f"{shown(value)}."
        )


def checked_extras(process_group: Any, **extras: Any) -> dict[str, Any]:
    """Checks types and returns the native object's arguments; native code checks ranges."""
    for name in ("hysteresis", "history_size"):
        if not hasattr(extras[name], "__index__"):
            raise TypeError(f"GradScaler: expected {name} to be an int, got {extras[name]!r}.")
    if process_group is not None and not hasattr(process_group, "group_name"):
        raise TypeError(
            f"GradScaler: expected process_group to be a ProcessGroup or None, got "
            f"{process_group!r}. Create a group with torch.distributed.new_group()."
        )
    group = None if process_group is None else str(process_group.group_name)
    return {**extras, "process_group": group}


class ScalerState(_TorchGradScaler):
    """torch's scaler, with the tensors stored in a native object under torch's private names."""

    _core: _C.GradScalerCore
    _extras: dict[str, Any]  # arguments of the native object

    _scale: Tensor | None = attribute_of("_core", "scale")
    _growth_tracker: Tensor | None = attribute_of("_core", "growth_tracker")

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        # Overridden for speed: torch's method reads both attributes twice in each step and update.
        scale, growth_tracker = self._core.scale, self._core.growth_tracker
        if scale is None or growth_tracker is None:
            return super()._check_scale_growth_tracker(funcname)  # raises
        return scale, growth_tracker

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor by which the scale grows.

        Args:
            new_factor (float): Positive and finite.

        Raises:
            ValueError: If `new_factor` is not positive and finite.
        """
        check_positive("growth_factor", new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor that multiplies the scale after an overflow.

        Args:
            new_factor (float): Positive and finite.

        Raises:
            ValueError: If `new_factor` is not positive and finite.
        """
        check_positive("backoff_factor", new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of consecutive steps without overflow before the scale grows.

        Args:
            new_interval (int): At least 1.

        Raises:
            ValueError: If `new_interval` is not an int of at least 1.
        """
        check_count("growth_interval", new_interval, 1)
        super().set_growth_interval(new_interval)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._core.initialize(dev, self._init_scale, self._init_growth_tracker)

    def scale(self, outputs: Any) -> Any:
        """Multiplies each output by the scale on the output's device.

        The first call creates the scale.

        Args:
            outputs (Tensor | Iterable): A tensor, or a list, tuple, namedtuple or other iterable,
                possibly nested. Lists and tuples keep their type. Other iterables become a lazy
                `map`, as in torch.

        Returns:
            The scaled outputs.

        Raises:
            TypeError: If `outputs` is a mapping.
            ValueError: If `outputs` is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Mapping):
            raise TypeError(
                f"GradScaler.scale: expected outputs to be a tensor or an iterable of tensors, got "
                f"{type(outputs).__name__}, whose values would stay unscaled. Pass its values."
            )
        if isinstance(outputs, tuple) and hasattr(outputs, "_make"):
            return outputs._make(self.scale(output) for output in outputs)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        if not isinstance(outputs, Tensor):
            if not isinstance(outputs, Iterable):
                raise ValueError("outputs must be a Tensor or an iterable of Tensors")
            return map(self.scale, outputs)
        # torch's method may read an asynchronous copy on the host before the copy is complete.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        scale, _ = self._check_scale_growth_tracker("scale")
        return outputs * _C.to_device(scale, outputs.device)

    def _fits_scale(self, new_scale: object) -> bool:
        return (
            isinstance(new_scale, Tensor)
            and new_scale.device.type == self._device
            and new_scale.numel() == 1
            and not new_scale.requires_grad
        )

    @property
    def step_counts(self) -> Tensor | None:
        """Iteration counts on the device, or None before the first ``scale()``.

        An int64 tensor with shape [3]: number of iterations, number of iterations that skipped a
        step, and whether the last iteration skipped a step. ``update()`` ends an iteration.
        """
        return self._core.step_counts

    def last_step_skipped(self) -> bool:
        """Returns whether the last iteration skipped a step; the host waits for the device.

        ``update()`` ends an iteration.
        """
        return self._enabled and self._core.counts()[2] != 0

    def skipped_steps(self) -> int:
        """Returns the number of iterations that skipped a step; the host waits for the device."""
        return self._core.counts()[1] if self._enabled else 0

    def scale_history(self) -> ScaleHistory:
        """Returns the last `history_size` iterations; the host waits for the device.

        State dicts do not contain the history.

        Returns:
            A :class:`ScaleHistory`, oldest iteration first.
        """
        rows = self._core.scale_history()
        return ScaleHistory(
            [step for step, _, _ in rows],
            [scale for _, scale, _ in rows],
            [skipped for _, _, skipped in rows],
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict; with `hysteresis` > 1, also ``_hysteresis_tracker``."""
        state = super().state_dict()
        if state and self._extras["hysteresis"] > 1:
            state["_hysteresis_tracker"] = self._core.hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict from this class or torch.amp.GradScaler.

        If loading raises, the scaler is unchanged.

        Args:
            state_dict (Mapping[str, Any]): A result of ``state_dict()``.

        Raises:
            RuntimeError: If `state_dict` is empty.
            KeyError: If a key is missing.
            TypeError: If a value is not a number.
            ValueError: If a number is out of range, for example a scale that is not positive and
                finite.

        Warns:
            UserWarning: If the scale is above 2^126, which torch's scaler allows. The scale becomes
                2^126.
        """
        if not self._enabled or len(state_dict) == 0:
            super().load_state_dict(dict(state_dict))
            return
        values: dict[str, Any] = {}
        for key, convert in _STATE_TYPES.items():
            if key not in state_dict:
                raise KeyError(
                    f"GradScaler.load_state_dict: expected state_dict to hold '{key}', got only "
                    f"{sorted(state_dict)}. Pass a result of state_dict()."
                )
            values[key] = self._number(key, state_dict[key], convert)
        tracker = state_dict.get("_hysteresis_tracker", self._extras["hysteresis"])
        tracker = int(self._number("_hysteresis_tracker", tracker, int))
        values["scale"] = _loaded_scale(values["scale"])
        for name in ("growth_factor", "backoff_factor"):
            check_positive(f"state_dict['{name}']", values[name])
        check_count("state_dict['growth_interval']", values["growth_interval"], 1)
        check_count("state_dict['_growth_tracker']", values["_growth_tracker"], 0)
        counts = {"_hysteresis_tracker": tracker, "_growth_tracker": values["_growth_tracker"]}
        for name, count in counts.items():
            if not -(2**31) <= count < 2**31:
                raise ValueError(
                    f"GradScaler: expected state_dict['{name}'] to be a 32-bit count, got "
                    f"{shown(count)}."
                )
        super().load_state_dict(values)
        self._core.set_hysteresis_tracker(tracker)

    @staticmethod
    def _number(key: str, value: Any, convert: type[float] | type[int]) -> float:
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"GradScaler.load_state_dict: expected state_dict['{key}'] to be a number, "
                f"got {shown(value)}."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # The native object cannot be pickled. super().__getstate__() saves its tensors' values.
        del state["_core"]
        state["_no_overflow"] = None
        state["_tracked"] = (self._core.hysteresis_tracker(), self._core.counts())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = dict(state)
        hysteresis_tracker, counts = attributes.pop("_tracked")
        for name in ("_scale", "_growth_tracker"):
            attributes.pop(name, None)
        self._core = _C.GradScalerCore(**attributes["_extras"])
        self._core.set_hysteresis_tracker(hysteresis_tracker)
        self._core.set_counts(counts)
        super().__setstate__(attributes)


def _loaded_scale(scale: float) -> float:
    """Clamps a saved scale to 2^126 with a warning, because torch's scaler has no upper bound."""
    if not LARGEST_SCALE < scale <= torch.finfo(torch.float32).max:
        check_scale("state_dict['scale']", scale)
        return scale
    warnings.warn(
        f"GradScaler.load_state_dict: state_dict['scale'] is {scale}, and becomes 2^126: the "
        "reciprocal of a larger scale is not a normal fp32 number.",
        stacklevel=3,
    )
    return LARGEST_SCALE
