# SPDX-License-Identifier: BSD-3-Clause
"""Which build of a wheel for several torches is loaded, and what is said where none fits."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from torchfuse import _loader

REMEDY = r"Build torchfuse again in this environment, .*pip install --no-cache-dir"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with builds for torch 2.11 and 2.15, each with CUDA 13 and without."""
    for minor in ("2.11", "2.15"):
        for kind, cuda in (("cu13", "13.0"), ("cpu", "")):
            record = {"torchfuse": "0.1.0", "torch": f"{minor}.0+cu130", "cuda": cuda}
            write(tmp_path / f"shims/torch{minor}-{kind}", record)
    monkeypatch.setattr(_loader, "_PACKAGE", tmp_path)
    _loader._builds.cache_clear()
    yield tmp_path
    _loader._builds.cache_clear()


def write(folder: Path, record: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build_info.json").write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize(
    ("torch", "cuda", "name"),
    [
        ("2.11.0+cu130", "13.0", "torch2.11-cu13"),
        ("2.15.3", "13.2", "torch2.15-cu13"),
        ("2.15.0+cpu", None, "torch2.15-cpu"),
        ("2.15.0a0+git1", None, "torch2.15-cpu"),
    ],
)
def test_the_build_is_that_of_torchs_minor_version(torch: str, cuda: str | None, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _loader.choose_build(torch, cuda).name == name
    assert _loader.version() == "0.1.0"


@pytest.mark.parametrize(
    ("cuda", "hip", "got"), [("12.9", None, "CUDA 12.9"), (None, "7.1", "ROCm 7.1")]
)
def test_a_torch_for_another_gpu_has_the_cpus_kernels(
    cuda: str | None, hip: str | None, got: str
) -> None:
    message = f"expected a torch for CUDA 13, got torch 2.11.0 for {got}: only CPU .* {REMEDY}"
    with pytest.warns(UserWarning, match=message):
        assert _loader.choose_build("2.11.0", cuda, hip).name == "torch2.11-cpu"


@pytest.mark.parametrize("torch", ["2.10.1", "2.12.0+cu130", "3.0.0"])
def test_a_torch_without_a_build_is_refused(torch: str) -> None:
    message = (
        rf"expected torch 2\.11 or 2\.15, with which it was built, got torch {torch[:4]}.* {REMEDY}"
    )
    with pytest.raises(ImportError, match=message):
        _loader.choose_build(torch, "13.0")


def test_a_wheel_without_cuda_serves_any_torch(package: Path) -> None:
    for folder in package.glob("shims/*-cu13"):
        shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _loader.choose_build("2.11.0", "12.9").name == "torch2.11-cpu"


def test_without_the_cpus_build_another_gpu_is_refused(package: Path) -> None:
    shutil.rmtree(package / "shims/torch2.11-cpu")
    for cuda, hip in (("12.9", None), (None, "7.1"), (None, None)):
        with pytest.raises(ImportError, match=f"expected a torch for CUDA 13, got .* {REMEDY}"):
            _loader.choose_build("2.11.0", cuda, hip)


def test_a_build_from_source_is_taken_as_it_is(package: Path) -> None:
    """Whatever its torch's CUDA is now; folders that a wheel left behind are no builds."""
    for record in package.glob("shims/*/build_info.json"):
        record.unlink()
    with pytest.raises(ImportError, match="the native library has not been built"):
        _loader.choose_build("2.11.0", None)
    write(package / ".", {"torchfuse": "0.1.0", "torch": "2.11.0", "cuda": ""})
    assert _loader.choose_build("2.11.0", "12.9") == package


@pytest.mark.parametrize("tag", ["cpython-39", "cpython-313t"])
def test_a_python_without_a_module_is_refused(package: Path, tag: str) -> None:
    folder = package / "shims/torch2.11-cpu"
    (folder / f"_C.{tag}-x86_64-linux-gnu.so").touch()
    known = tag.removeprefix("cpython-3")
    message = (
        rf"expected Python 3\.{known}, for which .*, got {sys.version_info[0]}\.\d+.* {REMEDY}"
    )
    with pytest.raises(ImportError, match=message):
        _loader._check_python(folder)
    (folder / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    _loader._check_python(folder)
