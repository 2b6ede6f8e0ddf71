# SPDX-License-Identifier: BSD-3-Clause
"""The names of apex and its native modules, and apex.amp in its first state, for a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import torchfuse.apex
from torchfuse.apex._registry import roots
from torchfuse.apex.amp.state import _amp_state


@pytest.fixture
def installed() -> Iterator[None]:
    torchfuse.apex.install()
    yield
    torchfuse.apex.uninstall()


@pytest.fixture
def amp(installed: None) -> Any:
    return importlib.import_module("apex.amp")


@pytest.fixture(autouse=True)
def _first_state() -> Iterator[None]:
    yield
    vars(_amp_state).clear()
    _amp_state.__init__()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before, finders = set(sys.modules), list(sys.meta_path)
    yield
    left = {name for name in set(sys.modules) - before if name.partition(".")[0] in roots}
    for name in left:
        del sys.modules[name]
    stayed = sys.meta_path != finders
    sys.meta_path[:] = finders
    assert not left
    assert not stayed
