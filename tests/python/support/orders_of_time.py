# SPDX-License-Identifier: BSD-3-Clause
"""Which tests run in which orders of time on the pretended device (pytest --orders-of-time).

All run eager. What calls a step or a collective runs in a lazy order too, and what is about
streams, scalers and collectives in three. Tests marked `combinations`, which are many of one kind,
run in one, with every value once (combinations.py). Ranks have an order each. The orders of a test
follow from its name, so that what fails also fails alone.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from pathlib import Path

import pytest
import torch

LAZY = (1, 2, 3)
#: Folders whose tests run in all of them.
_ABOUT_ORDER = ("amp/", "cuda/", "parallel/")
_PYTHON_TESTS = Path(__file__).resolve().parents[1]
#: Folders, and beginnings of files' and tests' names.
_CALL_STEPS = (
    "amp/",
    "cuda/",
    "multi_tensor_apply/",
    "ops/test_compile.py",
    "ops/test_fused_adam_op.py",
    "optimizers/",
    "parallel/",
    "test_clip_grad",
)


def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


def _name(path: Path) -> str:
    return path.relative_to(_PYTHON_TESTS).as_posix() if _PYTHON_TESTS in path.parents else ""


def orders_of(metafunc: pytest.Metafunc) -> list[int]:
    """The seeds; 0 is eager."""
    definition = metafunc.definition
    name = f"{_name(definition.path)}::{definition.name}"
    of_devices = {"device", "group_device"} & set(metafunc.fixturenames)
    on_cuda = of_devices or definition.get_closest_marker("cuda")
    if not on_cuda or not name.startswith(_CALL_STEPS):
        return [0]
    if definition.get_closest_marker("combinations") or not name.startswith(_ABOUT_ORDER):
        return [0, LAZY[0]]
    return [0, *LAZY]


def set_order(seed: int) -> None:
    """For this process and those that it starts."""
    os.environ["PRETENDED_CUDA_SEED"] = str(seed)
    _runtime().pretended_cuda_set_seed(seed)


def set_order_of_test(name: str) -> None:
    """The one of this test, whichever ran before it."""
    set_order(1 + zlib.crc32(name.encode()) % (1 << 30))


def end_of_test() -> None:
    """Waits for what the test left behind: an error there is this test's, not the next one's."""
    if not torch.cuda.is_initialized():
        return
    try:
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        _runtime().pretended_cuda_reset()
        pytest.fail(f"what this test left to the device has failed: {error}", pytrace=False)


def set_order_of_rank(rank: int) -> None:
    """Another one in each rank, unless all are eager."""
    if seed := int(os.environ.get("PRETENDED_CUDA_SEED", "0")):
        _runtime().pretended_cuda_set_seed(seed + 100 * rank)
