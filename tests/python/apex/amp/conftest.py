# SPDX-License-Identifier: BSD-3-Clause
"""apex.amp as a program imports it, in its first state."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from torchfuse.apex.amp.state import _amp_state


@pytest.fixture(autouse=True)
def _first_state() -> Iterator[None]:
    yield
    vars(_amp_state).clear()
    _amp_state.__init__()  # type: ignore[misc]


@pytest.fixture
def amp(installed: None) -> Any:
    return importlib.import_module("apex.amp")
