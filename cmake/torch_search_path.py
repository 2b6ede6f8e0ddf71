# SPDX-License-Identifier: BSD-3-Clause
"""Prints the torch folders of this interpreter's environments, one per line, best first.

It must not import torch: under pip's build isolation the import fails although the environment
that is installed into has torch, and a search of that environment's own folders finds it.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from importlib.machinery import PathFinder


def _platlib(prefix: str, scheme: str) -> str:
    return sysconfig.get_path("platlib", scheme, vars={"base": prefix, "platbase": prefix})


def search_path() -> list[str]:
    """The folders that may hold torch, in order of preference."""
    folders = [sysconfig.get_path("platlib")]
    # posix_local and deb_system are Debian's schemes: local/lib and dist-packages.
    schemes = [
        scheme
        for scheme in ("posix_prefix", "posix_local", "deb_system")
        if scheme in sysconfig.get_scheme_names()
    ]
    folders += [_platlib(sys.base_prefix, scheme) for scheme in schemes]
    folders.append(site.getusersitepackages())
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if os.environ.get(variable):
            folders.append(_platlib(os.environ[variable], "posix_prefix"))
    return folders + [folder for folder in sys.path if folder]


def main() -> None:
    """Prints what the search finds."""
    found: list[str] = []
    for folder in search_path():
        spec = PathFinder.find_spec("torch", [folder])
        for location in (spec and spec.submodule_search_locations) or []:
            if location not in found:
                found.append(location)
    print("\n".join(found))


if __name__ == "__main__":
    main()
