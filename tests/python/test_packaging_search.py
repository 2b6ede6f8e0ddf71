# SPDX-License-Identifier: BSD-3-Clause
"""Where the build looks for torch, and in which order."""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLATLIB = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The search, in an interpreter whose every folder lies under tmp_path."""
    path = ROOT / "cmake/torch_search_path.py"
    spec = importlib.util.spec_from_file_location("torch_search_path", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    original = sysconfig.get_path
    sysconfig.get_config_vars()  # read now, while the interpreter's own folders are in place

    def get_path(name: str, *arguments: Any, **keywords: Any) -> str:
        if arguments or keywords:
            return original(name, *arguments, **keywords)
        return str(tmp_path / "target" / PLATLIB)

    monkeypatch.setattr(sysconfig, "get_path", get_path)
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "user" / PLATLIB))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "target"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path")])
    return module


def put_torch(folder: Path) -> None:
    """A package by the name of torch."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").touch()


def make_environment(prefix: Path, *, system_site: bool = False) -> Path:
    """A virtual environment that holds torch."""
    put_torch(prefix / PLATLIB)
    (prefix / "bin").mkdir()
    configuration = f"home = /usr/bin\ninclude-system-site-packages = {str(system_site).lower()}\n"
    (prefix / "pyvenv.cfg").write_text(configuration, encoding="utf-8")
    return prefix


def found_in(search: ModuleType, root: Path, environ: dict[str, str]) -> list[str]:
    """Names of the folders below root in which torch was found, in order."""
    return [Path(path).relative_to(root).parts[0] for path in search.find_torch(environ)]


def test_order(search: ModuleType, tmp_path: Path) -> None:
    make_environment(tmp_path / "target", system_site=True)
    put_torch(tmp_path / "user" / PLATLIB)
    put_torch(tmp_path / "base" / PLATLIB)
    environ = {
        "VIRTUAL_ENV": str(make_environment(tmp_path / "active")),
        "CONDA_PREFIX": str(tmp_path / "conda"),
        "PATH": f"/usr/bin:{make_environment(tmp_path / 'on_path') / 'bin'}:/bin",
        "UV": "/usr/bin/uv",
        "PWD": str(tmp_path / "project/folder"),
    }
    put_torch(tmp_path / "conda" / PLATLIB)
    make_environment(tmp_path / "project/.venv")
    put_torch(tmp_path / "path")
    expected = ["target", "user", "base", "active", "conda", "on_path", "project", "path"]
    assert found_in(search, tmp_path, environ) == expected


def test_an_activated_environment_may_see_the_outer_packages(
    search: ModuleType, tmp_path: Path
) -> None:
    # As under uv: the interpreter's own environment is empty and closed.
    (tmp_path / "target").mkdir()
    (tmp_path / "target/pyvenv.cfg").write_text("uv = 0.13\n", encoding="utf-8")
    put_torch(tmp_path / "base" / PLATLIB)
    active = make_environment(tmp_path / "active", system_site=True)
    environ = {"VIRTUAL_ENV": str(tmp_path / "target"), "PATH": str(active / "bin"), "UV": "uv"}
    assert found_in(search, tmp_path, environ) == ["active", "base"]


def test_only_under_uv_the_surroundings_count(search: ModuleType, tmp_path: Path) -> None:
    make_environment(tmp_path / "project/.venv")
    on_path = make_environment(tmp_path / "on_path") / "bin"
    environ = {"PWD": str(tmp_path / "project"), "PATH": str(on_path)}
    assert found_in(search, tmp_path, environ) == []
    assert found_in(search, tmp_path, {**environ, "UV": "uv"}) == ["on_path", "project"]
