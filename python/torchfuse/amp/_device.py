# SPDX-License-Identifier: BSD-3-Clause
"""The device type of a program that names none."""

from __future__ import annotations

import torch


def chosen_device_type(expected: str, first_of_torch: str, device: object) -> str:
    """Returns the type of `device`; for None, "cuda" where there is a device of it, and else "cpu".

    Args:
        expected: begin of the error: class and argument.
        first_of_torch: first argument of the class of the same name in torch.cuda.amp, which takes
            no device: what a program may have passed by position.
        device: argument of the caller.

    Raises:
        ValueError: unless it is a string, a torch.device or None.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, str):
        return device
    if isinstance(device, torch.device):
        return device.type
    if callable(device):
        remedy = "A decorator is written with parentheses: @autocast()"
    else:
        name = first_of_torch
        if isinstance(device, bool):
            name = "enabled"
        elif isinstance(device, torch.dtype):
            name = "dtype"
        remedy = f"Pass what torch.cuda.amp takes first by name: {name}={device!r}"
    raise ValueError(
        f"{expected} to be a device type such as 'cuda', or None, got {device!r}. {remedy}."
    )
