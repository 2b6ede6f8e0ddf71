# SPDX-License-Identifier: BSD-3-Clause
"""Chooses the device type if the program passes none."""

from __future__ import annotations

import torch


def chosen_device_type(expected: str, first_of_torch: str, device: object) -> str:
    """Returns the type of `device`; for None, "cuda" if CUDA is available, otherwise "cpu".

    Args:
        expected: Beginning of the error message, with the class and the argument.
        first_of_torch: First argument of the torch.cuda.amp class with the same name, which has no
            device argument. The error suggests passing that argument by name.
        device: The caller's argument.

    Raises:
        ValueError: Unless `device` is a string, a torch.device or None.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, str):
        return device
    if isinstance(device, torch.device):
        return device.type
    if callable(device):
        remedy = "Write the decorator with parentheses: @autocast()"
    else:
        name = first_of_torch
        if isinstance(device, bool):
            name = "enabled"
        elif isinstance(device, torch.dtype):
            name = "dtype"
        remedy = f"Unlike in torch.cuda.amp, pass this argument by name: {name}={device!r}"
    raise ValueError(
        f"{expected} to be a device type such as 'cuda', or None, got {device!r}. {remedy}."
    )
