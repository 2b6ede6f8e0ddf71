# SPDX-License-Identifier: BSD-3-Clause
"""Prints the torch folders in the target environment of an installation, best first.

This program must not import torch. Under pip's build isolation, the import fails even if the target
environment contains torch, but a search of the environment's folders finds torch. uv builds in a
separate environment and sets VIRTUAL_ENV to that environment. So under uv, environments on PATH and
the nearest .venv are searched too.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

# Debian uses posix_local and deb_system (local/lib and dist-packages).
_SCHEMES = ("posix_prefix", "posix_local", "deb_system")


def _platlibs(prefix: str) -> Iterator[str]:
    for scheme in _SCHEMES:
        if scheme in sysconfig.get_scheme_names():
            paths = {"base": prefix, "platbase": prefix}
            yield sysconfig.get_path("platlib", scheme, vars=paths)


def _sees_outer_packages(prefix: str) -> bool:
    """Returns False for a virtual environment that was created without --system-site-packages."""
    configuration = Path(prefix, "pyvenv.cfg")
    if not configuration.is_file():
        return True
    for line in configuration.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key.strip().lower() == "include-system-site-packages":
            return value.strip().lower() == "true"
    return False


def _environment(prefix: str) -> Iterator[str]:
    """Yields the package folders from which Python imports in an environment."""
    yield from _platlibs(prefix)
    if _sees_outer_packages(prefix):
        yield site.getusersitepackages()
        yield from _platlibs(sys.base_prefix)


def _other_prefixes(environ: Mapping[str, str]) -> Iterator[str]:
    """Yields the prefixes of environments that environment variables or the folder name."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if environ.get(variable):
            yield environ[variable]
    if not environ.get("UV"):
        return
    for folder in environ.get("PATH", "").split(os.pathsep):
        if folder and Path(folder).parent.joinpath("pyvenv.cfg").is_file():
            yield str(Path(folder).parent)
    here = Path(environ.get("PWD", os.sep))
    for folder in (here, *here.parents):
        if folder.joinpath(".venv/pyvenv.cfg").is_file():
            yield str(folder / ".venv")
            return


def search_path(environ: Mapping[str, str]) -> Iterator[str]:
    """Yields folders that may contain torch, best first."""
    yield sysconfig.get_path("platlib")
    yield from _environment(sys.prefix)
    for prefix in _other_prefixes(environ):
        yield from _environment(prefix)
    yield from filter(None, sys.path)


def find_torch(environ: Mapping[str, str]) -> list[str]:
    """Returns all torch folders on the search path, best first."""
    found: list[str] = []
    for folder in search_path(environ):
        spec = PathFinder.find_spec("torch", [folder])
        for location in (spec and spec.submodule_search_locations) or []:
            if location not in found:
                found.append(location)
    return found


if __name__ == "__main__":
    print("\n".join(find_torch(os.environ)))
