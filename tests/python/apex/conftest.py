# SPDX-License-Identifier: BSD-3-Clause
"""The names of apex and its native modules, for the time of a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import torchfuse.apex
from torchfuse.apex._registry import roots


@pytest.fixture
def installed() -> Iterator[None]:
    torchfuse.apex.install()
    yield
    torchfuse.apex.uninstall()


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
