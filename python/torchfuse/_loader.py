# SPDX-License-Identifier: BSD-3-Clause
"""Loads the native library that was built for the installed torch and this Python.

torch's C++ interface changes between minor versions. A library that was built with a different
minor version fails when it is loaded, with an undefined symbol, or later. A package that was built
from source contains one build, for the torch that was installed at build time. A wheel contains one
build for each torch, in folders such as `shims/torch2.11-cu13` and `shims/torch2.11-cpu`, and one
kernel library for all builds. Every build records the versions in build_info.json, which is read
before any library is loaded.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent

# pip caches wheels that were built from an sdist or a git URL, regardless of torch's version.
# Without --no-deps, --force-reinstall would replace torch as well.
_REBUILD = (
    "Build torchfuse again in this environment, from its checkout or with its URL in place of the "
    "dot: pip install --no-cache-dir --force-reinstall --no-deps ."
)

#: Folder to add to CMAKE_PREFIX_PATH for find_package(torchfuse).
cmake_prefix_path: str = str(_PACKAGE)


@functools.cache
def _builds() -> dict[Path, dict[str, Any]]:
    """Returns the parsed build_info.json of each build in the package, by the build's folder."""
    shims = sorted(_PACKAGE.glob("shims/torch*/build_info.json"))
    try:
        return {
            path.parent: json.loads(path.read_text("utf-8"))
            for path in shims or [_PACKAGE / "build_info.json"]
        }
    except OSError:
        raise ImportError(
            "torchfuse: expected build_info.json in the package, got none: the native library "
            "has not been built. Build it with: pip install ."
        ) from None


def version() -> str:
    """Returns the version of torchfuse."""
    return str(next(iter(_builds().values()))["torchfuse"])


def _minor(full_version: str) -> str:
    return ".".join(full_version.split("+")[0].split(".")[:2])


def choose_build(installed: str, cuda: str | None, hip: str | None = None) -> Path:
    """Returns the folder of the build for the given torch.

    Args:
        installed: version of torch.
        cuda: CUDA version that torch was built with, or None.
        hip: ROCm version that torch was built with, or None.

    Raises:
        ImportError: if no build fits torch's minor version, or torch's CUDA when there is no CPU
            build.

    Warns:
        UserWarning: if the CPU build is chosen because torch is for a different CUDA or for ROCm.
    """
    builds = _builds()
    minors = sorted({_minor(info["torch"]) for info in builds.values()}, key=lambda m: int(m[2:]))
    fitting = [path for path, info in builds.items() if _minor(info["torch"]) == _minor(installed)]
    if not fitting:
        raise ImportError(
            f"torchfuse: expected torch {' or '.join(minors)}, with which it was built, "
            f"got torch {installed}. {_REBUILD}"
        )
    if fitting == [_PACKAGE]:
        return _PACKAGE
    majors = {str(builds[path]["cuda"]).partition(".")[0]: path for path in fitting}
    found = None if hip else majors.get((cuda or "").partition(".")[0])
    if found is not None:
        return found
    wanted = max(str(info["cuda"]).partition(".")[0] for info in builds.values())
    platform = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "no GPU"
    expected = (
        f"torchfuse: expected a torch for CUDA {wanted}, got torch {installed} for {platform}"
    )
    if "" not in majors:
        raise ImportError(f"{expected}. {_REBUILD}")
    if wanted:  # a wheel without CUDA was made for the CPU
        warnings.warn(f"{expected}: only CPU kernels are available. {_REBUILD}", stacklevel=2)
    return majors[""]


@functools.cache
def build_folder() -> Path:
    """Returns the folder of the build for the installed torch."""
    missing = None
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        missing = error
    # After torch was uninstalled, a leftover folder may be imported as a namespace package.
    if missing is not None or not hasattr(torch, "__version__"):
        minors = [_minor(info["torch"]) for info in _builds().values()]
        raise ImportError(
            f"torchfuse: expected torch {min(minors)} or newer, got none. Install it first: "
            "pip install torch"
        ) from missing
    return choose_build(torch.__version__, torch.version.cuda, torch.version.hip)


def recorded_build() -> dict[str, Any]:
    """Returns the parsed build_info.json for the installed torch."""
    builds = _builds()
    # If there is only one build, torch is not needed to choose it.
    return next(iter(builds.values())) if len(builds) == 1 else builds[build_folder()]


def _check_python(folder: Path) -> None:
    """Raises ImportError if the build contains no extension module for this Python."""
    there = {path.name.removeprefix("_C") for path in folder.glob("_C.*.so")}
    if there and not there.intersection(EXTENSION_SUFFIXES):
        known = ", ".join(f"3.{tag[1:]}" for tag in sorted(name.split("-")[1] for name in there))
        raise ImportError(
            f"torchfuse: expected Python {known}, for which it was built, got "
            f"{sys.version.split()[0]} with modules named {EXTENSION_SUFFIXES[0]}. {_REBUILD}"
        )


def load() -> None:
    """Imports torch and the native module, which registers torch.ops.torchfuse."""
    folder = build_folder()
    import torch

    import torchfuse

    _check_python(folder)
    if str(folder) not in torchfuse.__path__:
        torchfuse.__path__.insert(0, str(folder))  # before a module of another installation
    try:
        importlib.import_module("torchfuse._C")
    except ImportError as error:
        wheel = (
            "Reinstall the wheel: pip install --force-reinstall --no-deps WHEEL. For an unreleased "
            "torch, build torchfuse from source"
        )
        raise ImportError(
            f"torchfuse: expected its native library to load with torch {torch.__version__}, "
            f"got: {error}. {_REBUILD if folder == _PACKAGE else wheel}"
        ) from error


def runs_as_program() -> bool:
    """Whether this process is `python -m torchfuse`, which reports a library that fails to load."""
    # While Python imports the package to find __main__, argv[0] is still "-m".
    return sys.argv[:1] == ["-m"] and ["-m", "torchfuse"] in [
        sys.orig_argv[index : index + 2] for index in range(len(sys.orig_argv))
    ]
