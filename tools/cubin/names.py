# SPDX-License-Identifier: BSD-3-Clause
"""Short names of kernels, such as fused_update<Adam, bf16, fp32, fp32, master, aligned>."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from cubin import CannotCheckError

_NAMESPACES = re.compile(r"\(anonymous namespace\)::|torchfuse::kernels::|cuda::")
_TYPES = {"float": "fp32", "double": "fp64", "Half": "fp16", "BFloat16": "bf16"}
_TYPE = re.compile(rf"\b({'|'.join(_TYPES)})\b")
# <UpdateTypes<functor, param, grad, state, master>, aligned>, and <functor, aligned> of mixed.
_UPDATE = re.compile(r"^(\w+)<UpdateTypes<(.*), (true|false)>, (true|false)>$")
_MIXED = re.compile(r"^(fused_update_mixed)<(\w+)(), (true|false)>$")


def demangle(symbols: Sequence[str]) -> list[str]:
    """The C++ names behind mangled symbols, without parameters.

    Raises:
        CannotCheckError: c++filt of binutils is missing.
    """
    text = "\n".join(symbols)
    try:
        run = subprocess.run(
            ["c++filt", "-p"], check=True, capture_output=True, text=True, input=text
        )
    except OSError as error:
        raise CannotCheckError(f"expected c++filt (binutils) on PATH, got: {error}.") from error
    return run.stdout.splitlines()


def short_name(declaration: str) -> str:
    """The short name of a demangled kernel."""
    name = _TYPE.sub(lambda match: _TYPES[match[0]], _NAMESPACES.sub("", declaration))
    name = re.sub(r"_kernel(?=<|$)", "", name)
    match = _UPDATE.match(name) or _MIXED.match(name)
    if match is None:
        return name
    kernel, types, master, aligned = match.groups()
    words = [types, *(["master"] if master == "true" else [])]
    words.append("aligned" if aligned == "true" else "misaligned")
    return f"{kernel}<{', '.join(words)}>"


def family(name: str) -> str:
    """The kernel's name without template arguments."""
    return name.partition("<")[0]
