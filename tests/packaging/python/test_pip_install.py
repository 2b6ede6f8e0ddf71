# SPDX-License-Identifier: BSD-3-Clause
"""Every way to install: a real step afterwards, only the files that belong there, none left."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from environments import (
    WORK,
    CommandError,
    Environment,
    Plain,
    check_installed_since,
    one_line,
    run,
    symlink_torch,
)


def find_uv() -> str:
    """The uv of this environment."""
    path = shutil.which("uv")
    assert path is not None, "the tests need uv: pip install -r requirements-packaging.txt"
    return path


def test_plain(plain: Plain, checkout: Path) -> None:
    environment = plain.environment
    torch = environment.site_packages / "torch"
    assert f"torchfuse: using torch {run_version(environment)} in {torch}" in plain.log
    assert "torchfuse: building for CPU" in plain.log
    check_installed_since(environment, plain.files_before, checkout)
    assert Path(environment.step()) == environment.site_packages / "torchfuse"
    assert re.search(r"^native library +loads$", environment.report(), re.MULTILINE)
    environment.pip("check")


def run_version(environment: Environment) -> str:
    """Version of the environment's torch."""
    return run([environment.python, "-c", "import torch; print(torch.__version__)"]).strip()


def test_editable(linked_environment: Environment, checkout: Path) -> None:
    before = linked_environment.files()
    linked_environment.pip("install", "--editable", checkout)
    assert Path(linked_environment.step()) == checkout / "python/torchfuse"
    new = linked_environment.files() - before
    assert not any(name.startswith("torchfuse/") for name in new), new
    linked_environment.pip("uninstall", "--yes", "torchfuse")
    assert linked_environment.files() == before


@pytest.mark.parametrize("way", ["activated", "found", "told"])
def test_uv(plain: Plain, checkout: Path, way: str, tmp_path: Path) -> None:
    project = WORK / f"uv-{way}"
    project.mkdir()
    environment = Environment(f"uv-{way}/.venv" if way == "found" else f"uv-{way}/environment")
    symlink_torch(environment.site_packages, plain.environment.site_packages)
    before = environment.files()
    uv = find_uv()
    # Without --no-deps a resolver that prefers another torch would write through the links.
    install = [uv, "pip", "install", "--no-deps", "--refresh-package", "torchfuse"]
    variables: dict[str, str | None] = {"UV_CACHE_DIR": str(WORK / "uv-cache")}
    if way == "activated":
        path = f"{environment.prefix}/bin{os.pathsep}{os.environ['PATH']}"
        variables |= {"VIRTUAL_ENV": str(environment.prefix), "PATH": path}
    elif way == "told":
        project = tmp_path  # no .venv lies above it
        install += ["--python", str(environment.python)]
        with pytest.raises(CommandError) as failure:
            run([*install, checkout], cwd=project, **variables)
        assert "set TORCHFUSE_TORCH_DIR to its folder" in one_line(str(failure.value))
        variables["TORCHFUSE_TORCH_DIR"] = str(environment.site_packages / "torch")
    run([*install, checkout], cwd=project, **variables)
    check_installed_since(environment, before, checkout)
    assert Path(environment.step()) == environment.site_packages / "torchfuse"
    run([uv, "pip", "uninstall", "--python", environment.python, "torchfuse"], cwd=project)
    assert environment.files() == before


def test_a_wheel_for_another_torch_says_so_and_names_what_helps(
    linked_environment: Environment, plain: Plain, checkout: Path
) -> None:
    # What pip's cache of built wheels does after torch was exchanged, without a second torch.
    linked_environment.pip("install", checkout)
    info = linked_environment.site_packages / "torchfuse/build_info.json"
    version = run_version(linked_environment)
    info.write_text(info.read_text().replace(f'"torch": "{version}"', '"torch": "2.99.0"'))
    with pytest.raises(CommandError) as failure:
        linked_environment.step()
    remedy = "pip install --no-cache-dir --force-reinstall --no-deps ."
    assert "expected torch 2.99, with which it was built" in str(failure.value)
    assert remedy in str(failure.value)
    # The remedy as it stands there, run in the checkout.
    run([linked_environment.python, "-m", *remedy.split()], cwd=checkout)
    linked_environment.step()
    assert run_version(linked_environment) == version
