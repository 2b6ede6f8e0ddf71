# SPDX-License-Identifier: BSD-3-Clause
"""Loads the native library, after checking that it was built with the installed torch version.

torch's C++ interface changes between minor versions; a library built with another minor version
fails with an undefined symbol, or later. The build therefore records its torch version in
build_info.json, which can be read without loading the library.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_BUILD_INFO = _PACKAGE / "build_info.json"

# pip caches wheels that it built from an sdist or a git URL, whatever torch they were built with.
# Without --no-deps it would replace torch as well.
_REBUILD = (
    "Build torchfuse again in this environment, from its checkout or with its URL in place of the "
    "dot: pip install --no-cache-dir --force-reinstall --no-deps ."
)

#: Folder to add to CMAKE_PREFIX_PATH for find_package(torchfuse).
cmake_prefix_path: str = str(_PACKAGE)


@functools.cache
def recorded_build() -> dict[str, Any]:
    """Returns what the build recorded: at least the full versions of `torchfuse` and `torch`."""
    try:
        text = _BUILD_INFO.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ImportError(
            f"torchfuse: expected {_BUILD_INFO.name} in the package, got none: the native library "
            "has not been built. Build it with: pip install ."
        ) from None
    info: dict[str, Any] = json.loads(text)
    return info


def version() -> str:
    """Returns the version of torchfuse."""
    return str(recorded_build()["torchfuse"])


def _minor(full_version: str) -> str:
    return ".".join(full_version.split("+")[0].split(".")[:2])


def check_torch(installed: str) -> None:
    """Raises ImportError unless `installed` has the same minor version as the build's torch."""
    built = str(recorded_build()["torch"])
    if _minor(installed) != _minor(built):
        raise ImportError(
            f"torchfuse: expected torch {_minor(built)}, with which it was built, "
            f"got torch {installed}. {_REBUILD}"
        )


def load() -> None:
    """Imports torch and the native module, which registers torch.ops.torchfuse."""
    import torch

    check_torch(torch.__version__)
    try:
        importlib.import_module("torchfuse._C")
    except ImportError as error:
        raise ImportError(
            f"torchfuse: expected its native library to load with torch {torch.__version__}, "
            f"got: {error}. {_REBUILD}"
        ) from error


def runs_as_program() -> bool:
    """Whether this process is `python -m torchfuse`, which reports a library that fails to load."""
    # While python imports the package to find __main__, argv[0] is still the option.
    return sys.argv[:1] == ["-m"] and ["-m", "torchfuse"] in [
        sys.orig_argv[index : index + 2] for index in range(len(sys.orig_argv))
    ]
