# SPDX-License-Identifier: BSD-3-Clause
"""The machine code of CUDA kernels, as NVIDIA's cuobjdump reads it, and what it must be.

Kernels have short names, such as fused_update<Adam, bf16, fp32, fp32, master, aligned>.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_NAMESPACES = re.compile(r"\(anonymous namespace\)::|torchfuse::kernels::|cuda::")
_TYPES = {"float": "fp32", "double": "fp64", "Half": "fp16", "BFloat16": "bf16"}
_TYPE = re.compile(rf"\b({'|'.join(_TYPES)})\b")
# <TypedAccess<functor, param, grad, state, master>, aligned> or <LookedUpAccess<functor>, aligned>.
# A measure kernel has one form.
_OPTIMIZER = re.compile(
    r"^(\w+)<(?:Typed|(LookedUp))Access<(.*?)(?:, (true|false))?>(?:, (true|false)| )>$"
)


class CannotCheckError(Exception):
    """Something that the check needs is missing or not understood: no verdict on the kernels."""


@dataclass(frozen=True)
class Kernel:
    """What a library says about one kernel on one architecture."""

    symbol: str
    arch: int
    registers: int
    register_cap: int  # what launch bounds leave per thread; 255 without a bound
    threads: int  # per block, at most
    stack_bytes: int
    argument_bytes: int
    shared_bytes: int
    opcodes: Counter[str]  # how often each instruction occurs, as in {"LDG.E.EF.128": 4}

    @property
    def text_bytes(self) -> int:
        """The size of the code: an instruction has 16 bytes since sm_70."""
        return 16 * self.opcodes.total()

    def count(self, operation: str, *modifiers: str) -> int:
        """How many instructions of an operation have all these modifiers."""
        return sum(
            number
            for opcode, number in self.opcodes.items()
            if (words := opcode.split("."))[0] == operation and {*modifiers} <= {*words}
        )


def granted(registers: int) -> int:
    """Registers are handed out in eights: what a thread really takes."""
    return (registers + 7) // 8 * 8


def demangle(symbols: Sequence[str]) -> list[str]:
    """The C++ names behind mangled symbols, without parameters.

    Raises:
        CannotCheckError: c++filt of binutils is missing.
    """
    try:
        names = subprocess.check_output(["c++filt", "-p"], text=True, input="\n".join(symbols))
    except OSError as error:
        raise CannotCheckError(f"expected c++filt (binutils) on PATH, got: {error}.") from error
    return names.splitlines()


def short_name(declaration: str) -> str:
    """The short name of a demangled kernel."""
    name = _TYPE.sub(lambda match: _TYPES[match[0]], _NAMESPACES.sub("", declaration))
    name = re.sub(r"_kernel(?=<|$)", "", name)
    name, averages = re.subn(r"EmaAccess<(.*) >(?=, (?:true|false)>$)", r"\1", name)
    match = _OPTIMIZER.match(name)
    if match is None:
        return name
    kernel, looked_up, types, master, aligned = match.groups()
    parts = {"looked up": looked_up, "master": master == "true", "ema": bool(averages)}
    parts |= {"aligned": aligned == "true", "misaligned": aligned == "false"}
    return f"{kernel}<{', '.join([types, *(word for word, said in parts.items() if said)])}>"
