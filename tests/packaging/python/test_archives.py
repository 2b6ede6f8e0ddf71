# SPDX-License-Identifier: BSD-3-Clause
"""Wheel, sdist and git URL: they hold everything that is needed, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from environments import (
    ANOTHER_BUILD,
    WORK,
    Environment,
    Plain,
    check_installed_since,
    expected_package,
    extension_suffix,
    run,
)

VERSION = (Path(__file__).resolve().parents[3] / "VERSION").read_text(encoding="utf-8").strip()


@pytest.fixture(scope="module")
def littered_checkout(checkout: Path) -> Path:
    """What an editable install and older builds leave in a checkout must not be packed."""
    for name in (
        f"build/lib.linux-x86_64-{sys.implementation.cache_tag}/torchfuse/removed_long_ago.py",
        "python/torchfuse/_C.cpython-39-x86_64-linux-gnu.so",
        "python/torchfuse/lib/libremoved.so",
        "python/torchfuse/include/torchfuse/removed.h",
        "python/torchfuse/build_info.json",
        "python/torchfuse/notes.txt",
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    return checkout


@pytest.fixture(scope="module")
def wheel(plain: Plain, littered_checkout: Path) -> Path:
    """The wheel that `pip wheel .` makes."""
    folder = WORK / "wheel"
    plain.environment.pip("wheel", "--no-deps", "--wheel-dir", folder, littered_checkout)
    (path,) = folder.iterdir()
    return path


def test_wheel_contents(wheel: Path, plain: Plain, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    assert len(names) == len(set(names))
    described = {
        f"torchfuse-{VERSION}.dist-info/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt")
    }
    expected = expected_package(checkout, extension_suffix(plain.environment.python))
    assert set(names) == expected | described


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"torchfuse-{VERSION}.dist-info/METADATA").decode()
    fields = text.split("\n\n")[0].splitlines()
    assert "Requires-Python: >=3.10" in fields
    assert "License-Expression: BSD-3-Clause" in fields
    required = [field for field in fields if field.startswith("Requires-Dist: ")]
    assert [field for field in required if "extra" not in field] == [
        "Requires-Dist: torch<2.16,>=2.11"
    ]
    for minor in range(10, 16):
        assert f"Classifier: Programming Language :: Python :: 3.{minor}" in fields


def test_wheel_libraries_find_torch_by_relative_paths_only(wheel: Path) -> None:
    folder = WORK / "wheel-contents"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    libraries = [path for path in folder.rglob("*.so") if path.is_file()]
    assert len(libraries) == 3
    for library in libraries:
        dynamic = subprocess.run(
            ["readelf", "-d", library], capture_output=True, text=True, check=True
        ).stdout
        paths = re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", dynamic)
        assert all(path.startswith("$ORIGIN") for path in ":".join(paths).split(":") if paths)
        assert "libcudart" not in dynamic
    # find_package(torchfuse) must not look into the folders of the machine that built the wheel.
    for file in folder.rglob("*.cmake"):
        assert str(WORK) not in file.read_text(encoding="utf-8"), file


@pytest.fixture(scope="module")
def sdist(littered_checkout: Path) -> Path:
    """The sdist that the standard front end makes."""
    folder = WORK / "sdist"
    run([sys.executable, "-m", "build", "--sdist", "--outdir", folder, littered_checkout])
    (path,) = folder.iterdir()
    return path


def test_sdist_installs(linked_environment: Environment, sdist: Path, checkout: Path) -> None:
    before = linked_environment.files()
    linked_environment.pip("install", sdist, **ANOTHER_BUILD)
    check_installed_since(linked_environment, before, checkout)
    assert Path(linked_environment.step()) == linked_environment.site_packages / "torchfuse"
    linked_environment.pip("uninstall", "--yes", "torchfuse")
    assert linked_environment.files() == before
