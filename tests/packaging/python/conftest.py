# SPDX-License-Identifier: BSD-3-Clause
"""The checkout that the tests install from, and the first environment, built from nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from environments import (
    WORK,
    Environment,
    Plain,
    copy_checkout,
    hard_link_torch,
    symlink_torch,
)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """A copy of the working tree. Its build folder is shared by all installs from it."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    return copy_checkout(WORK / "checkout")


@pytest.fixture(scope="session")
def plain(checkout: Path) -> Plain:
    """`pip install .` as the README says it: build isolation, nothing built before."""
    environment = Environment("plain")
    hard_link_torch(environment.site_packages)
    before = environment.files()
    log = environment.pip("install", "--verbose", checkout)
    return Plain(environment, before, log)


@pytest.fixture
def linked_environment(plain: Plain, request: pytest.FixtureRequest) -> Environment:
    """An environment of the test's name whose torch is that of the first one."""
    environment = Environment(request.node.name.removeprefix("test_"))
    symlink_torch(environment.site_packages, plain.environment.site_packages)
    return environment
