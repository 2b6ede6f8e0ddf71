# SPDX-License-Identifier: BSD-3-Clause
"""Every supported Python that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import Environment, Plain, expected_package, extension_suffix, symlink_torch

MINORS = (10, 11, 12, 13)


def find_interpreter(minor: int) -> str:
    """A Python 3.<minor> with headers, from PATH or pyenv; skips the test if there is none."""
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(name), *sorted(pyenv.glob(f"versions/3.{minor}.*/bin/{name}"))]
    code = (
        "import os, sys, sysconfig, venv; "
        "assert os.path.exists(sysconfig.get_path('include') + '/Python.h'); "
        "print(*sys.version_info[:2])"
    )
    for candidate in filter(None, candidates):
        # A shim of pyenv may be there without an interpreter behind it.
        result = subprocess.run(
            [candidate, "-c", code], capture_output=True, text=True, check=False
        )
        if result.stdout.split() == ["3", str(minor)]:
            return str(candidate)
    pytest.skip(f"{name} with headers and venv was not found on PATH or in pyenv's folder")


@pytest.mark.parametrize("minor", MINORS)
def test_builds(minor: int, plain: Plain, checkout: Path) -> None:
    """Compiles and installs; torch's own module is of another Python, so nothing is imported."""
    environment = Environment(f"python3.{minor}", find_interpreter(minor))
    symlink_torch(environment.site_packages, plain.environment.site_packages)
    before = environment.files()
    # The folder of the first build: only what knows Python is compiled again.
    folder = checkout / f"build/{sys.implementation.cache_tag}-release"
    environment.pip("install", "--no-deps", checkout, TORCHFUSE_BUILD_DIR=str(folder))
    new = environment.files() - before
    tag = f"Tag: cp3{minor}-cp3{minor}-linux_x86_64"
    (wheel,) = (name for name in new if name.endswith(".dist-info/WHEEL"))
    assert tag in (environment.site_packages / wheel).read_text(encoding="utf-8")
    package = {name for name in new if name.startswith("torchfuse/")}
    assert package == expected_package(checkout, extension_suffix(environment.python))
