# SPDX-License-Identifier: BSD-3-Clause
"""Short names of kernels, such as fused_update<Adam, bf16, fp32, fp32, master, aligned>."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from cubin.errors import CannotCheckError

_NAMESPACES = re.compile(r"\(anonymous namespace\)::|torchfuse::kernels::|cuda::")
_TYPES = {"float": "fp32", "double": "fp64", "Half": "fp16", "BFloat16": "bf16"}
_TYPE = re.compile(rf"\b({'|'.join(_TYPES)})\b")
# fused_update_kernel<UpdateTypes<functor, param, grad, state, master>, aligned>
_MIXED = re.compile(r"^(fused_update_mixed)<(\w+), (true|false)>$")
_UPDATE = re.compile(r"^(\w+)<UpdateTypes<(.*), (true|false)>, (true|false)>$")


def demangle(symbols: Sequence[str]) -> list[str]:
    """The C++ declarations behind mangled symbols.

    Raises:
        CannotCheckError: c++filt of binutils is missing.
    """
    try:
        run = subprocess.run(
            ["c++filt"], check=True, capture_output=True, text=True, input="\n".join(symbols)
        )
    except OSError as error:
        raise CannotCheckError(f"expected c++filt (binutils) on PATH, got: {error}.") from error
    return run.stdout.splitlines()


def _without_parameters(declaration: str) -> str:
    """Cuts `(...)` behind the name; parentheses within template arguments stay."""
    depth = 0
    for i, character in enumerate(declaration):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return declaration[:i]
    return declaration


def short_name(declaration: str) -> str:
    """The short name of a demangled kernel."""
    name = _without_parameters(_NAMESPACES.sub("", declaration)).removeprefix("void ")
    name = _TYPE.sub(lambda match: _TYPES[match.group()], name)
    name = re.sub(r"_kernel(?=<|$)", "", name)
    mixed = _MIXED.match(name)
    update = _UPDATE.match(name)
    if mixed is not None:
        kernel, types, aligned = mixed.groups()
        words = [types]
    elif update is not None:
        kernel, types, master, aligned = update.groups()
        words = [types, *(["master"] if master == "true" else [])]
    else:
        return name
    words.append("aligned" if aligned == "true" else "misaligned")
    return f"{kernel}<{', '.join(words)}>"


def family(name: str) -> str:
    """The kernel's name without template arguments."""
    return name.partition("<")[0]
