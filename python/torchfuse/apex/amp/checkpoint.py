# SPDX-License-Identifier: BSD-3-Clause
"""State dicts of the loss scalers."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torchfuse.apex.amp.state import initialized, maybe_print


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the scale of every loss and its count of checks without overflow.

    Args:
        destination: dict to add the entries to. None: a new one.

    Returns:
        `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`; no entries if amp is not
        enabled. The masters of O2 are in the optimizer's state dict.

    Raises:
        RuntimeError: before `amp.initialize`.
    """
    state = initialized("amp.state_dict")
    found: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_scalers(state)):
        found[f"loss_scaler{index}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Loads a result of `state_dict`, also of apex.

    With another number of losses, the scales that both have are loaded, and a line is printed.

    Args:
        state_dict: the state dict.

    Raises:
        TypeError: for anything but a dict.
        RuntimeError: for keys of another kind, and before `amp.initialize`; nothing is changed.
        ValueError: for values that are no scale and count; nothing is changed.
    """
    state = initialized("amp.load_state_dict")
    where = "amp.load_state_dict: expected state_dict"
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{where} to be a dict, got {type(state_dict).__name__}.")
    foreign = [key for key in state_dict if not re.fullmatch(r"loss_scaler\d+", str(key))]
    if foreign:
        raise RuntimeError(
            f"{where} to have keys 'loss_scaler0' and so on, got {', '.join(map(repr, foreign))}. "
            "Load what amp.state_dict() returned."
        )
    loaded = {key: _read(f"{where}[{key!r}]", entry) for key, entry in state_dict.items()}
    scalers = _scalers(state)
    if state.opt_properties.enabled and len(loaded) != len(scalers):
        maybe_print(
            f"Warning: the amp state dict has {len(loaded)} loss scalers, the program "
            f"{len(scalers)}. Those that both have are loaded."
        )
    for index, scaler in enumerate(scalers):
        if f"loss_scaler{index}" in loaded:
            scaler._loss_scale, scaler._unskipped = loaded[f"loss_scaler{index}"]


def _scalers(state: Any) -> list[Any]:
    return state.loss_scalers if state.opt_properties.enabled else []


def _read(where: str, entry: Any) -> tuple[float, int]:
    try:
        scale, unskipped = float(entry["loss_scale"]), int(entry["unskipped"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} to have numbers 'loss_scale' and 'unskipped', got {entry!r}."
        ) from error
    if not (math.isfinite(scale) and scale > 0.0) or unskipped < 0:
        raise ValueError(
            f"{where} to have a positive loss_scale and a count of at least 0, got {scale} and "
            f"{unskipped}."
        )
    return scale, unskipped
