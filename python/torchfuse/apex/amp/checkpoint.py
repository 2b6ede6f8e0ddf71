# SPDX-License-Identifier: BSD-3-Clause
"""Saves and loads loss scalers as state dicts."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torchfuse.apex.amp.state import initialized, maybe_print


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns each loss scaler's scale and number of consecutive checks without overflow.

    Args:
        destination (dict | None, default None): Dict to add the entries to. None: a new dict.

    Returns:
        `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`, without entries if amp is
        disabled. O2's masters are saved in the optimizer's state dict.

    Raises:
        RuntimeError: if `amp.initialize` has not been called.
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
    """Loads a state dict that `state_dict`, here or in apex, returned.

    If the numbers of loss scalers differ, the scalers that exist in both are loaded and a warning
    is printed. After an error, nothing has changed.

    Args:
        state_dict (Mapping): State dict to load.

    Raises:
        TypeError: if `state_dict` is not a dict.
        RuntimeError: for unknown keys, and if `amp.initialize` has not been called.
        ValueError: for an entry without a valid scale and count.
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
            f"Warning: the amp state dict contains {len(loaded)} loss scalers, but the program "
            f"uses {len(scalers)}. Only scalers in both are loaded."
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
