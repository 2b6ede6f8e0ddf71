# SPDX-License-Identifier: BSD-3-Clause
"""State dicts bit for bit, and one bit of damage in a file."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from support.compare import assert_same_bits


def assert_same_state(
    actual: Mapping[Any, Mapping[str, Tensor]], expected: Mapping[Any, Mapping[str, Tensor]]
) -> None:
    """The same parameters with the same tensors, bit for bit."""
    assert set(actual) == set(expected)
    for key, tensors in expected.items():
        assert set(actual[key]) == set(tensors)
        for name, tensor in tensors.items():
            assert_same_bits(actual[key][name], tensor, f"{name}[{key}]")


def mark_as_folder(path: Path, name: str) -> None:
    """Sets the bit by which a zip file's list of entries says that one of them is a folder."""
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        (size,) = struct.unpack_from("<H", data, at + 28)
        if data[at + 46 : at + 46 + size].endswith(name.encode()):
            data[at + 38] |= 0x10
            path.write_bytes(data)
            return
        at = data.find(b"PK\x01\x02", at + 46)
    raise ValueError(f"expected {path} to hold {name}, got none.")
