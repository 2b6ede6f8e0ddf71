# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of LARC's tests."""

from __future__ import annotations

import pytest
from support.larc import INNER, Make


@pytest.fixture(params=INNER.values(), ids=INNER)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes each optimizer that LARC is put around."""
    return request.param  # type: ignore[no-any-return]
