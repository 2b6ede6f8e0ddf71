# SPDX-License-Identifier: BSD-3-Clause
"""Runs cuobjdump on a library and gathers what it says about each kernel.

-res-usage  registers, stack and shared memory
-elf        launch bounds and size of the arguments, as attributes of .nv.info.<kernel>
-sass       instructions; takes a minute for the whole library
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from cubin import CannotCheckError, Kernel

# From sm_90 on the system takes this much of each block's shared memory, and cuobjdump counts it in
# wherever an image has shared memory at all.
RESERVED_SHARED_BYTES = 1024

_USAGE = re.compile(
    r"^arch = sm_(\d+)$|^ Function (\S+):\n +REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+) ",
    re.MULTILINE,
)
# As in `/*0070*/ @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;`; the encoding at its end is no match.
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([^\s;]+)")
_CAP, _THREADS, _ARGUMENTS = "MAXREG_COUNT", "MAX_THREADS", "CBANK_PARAM_SIZE"

Usage = dict[int, list[tuple[str, list[int]]]]
"""Per architecture: kernels with their registers, stack, shared and local memory."""


class Cuobjdump:
    """NVIDIA's reader of machine code."""

    def __init__(self, nvcc: str | None) -> None:
        """Looks beside nvcc, then in triton, which comes with torch for CUDA.

        Raises:
            CannotCheckError: cuobjdump, or nvdisasm, which it calls, is in neither.
        """
        triton = find_spec("triton")
        inside = (triton and triton.submodule_search_locations) or ()
        folders = [Path(folder, "backends/nvidia/bin") for folder in inside]
        if nvcc:
            folders.insert(0, Path(nvcc).resolve().parent)
        for folder in folders:
            if all(os.access(folder / tool, os.X_OK) for tool in ("cuobjdump", "nvdisasm")):
                self.path = folder / "cuobjdump"
                self.version = _release("".join(self._lines("--version")))
                return
        raise CannotCheckError(
            "expected cuobjdump and nvdisasm beside nvcc or in triton, which comes with torch for "
            f"CUDA, got them in none of {[str(folder) for folder in folders]}. CUDA has them, and "
            "so have nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm on PyPI."
        )

    def _lines(self, *arguments: str | Path) -> Iterator[str]:
        """What it prints, which is too much to hold at once."""
        command = [str(argument) for argument in (self.path, *arguments)]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            assert process.stdout is not None
            yield from process.stdout
            if process.wait() != 0:
                errors.seek(0)
                raise CannotCheckError(
                    f"{' '.join(command)}: expected exit status 0, got {process.returncode}: "
                    f"{errors.read().strip()}"
                )

    def usage(self, library: Path) -> Usage:
        """The architectures and kernels of a library, and their resources."""
        found: Usage = {}
        for arch, symbol, *numbers in _USAGE.findall("".join(self._lines("-res-usage", library))):
            if arch:
                kernels = found.setdefault(int(arch), [])
            else:
                kernels.append((symbol, [int(number) for number in numbers]))
        return {arch: kernels for arch, kernels in found.items() if kernels}

    def compiler(self, library: Path, arch: int) -> str:
        """The release of the compiler that made a library; nvcc 12 does not write it down."""
        lines = self._lines("-elf", "-arch", f"sm_{arch}", library)
        return next((_release(line) for line in lines if "Tool Version:" in line), "unknown")

    def kernels(self, library: Path, usage: Usage) -> list[Kernel]:
        """All kernels of a library, for the architectures of `usage`.

        Raises:
            CannotCheckError: the library cannot be read, or says too little about a kernel.
        """
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            opcodes = pool.map(lambda arch: self._opcodes(library, arch), usage)
            attributes = pool.map(lambda arch: self._attributes(library, arch), usage)
            return [
                _kernel(symbol, arch, numbers, own[symbol], code[symbol])
                for arch, own, code in zip(usage, attributes, opcodes, strict=True)
                for symbol, numbers in usage[arch]
            ]

    def _attributes(self, library: Path, arch: int) -> defaultdict[str, dict[str, int]]:
        """By kernel and name; what has several numbers counts as their product."""
        found: defaultdict[str, dict[str, int]] = defaultdict(dict)
        symbol = attribute = ""
        for line in self._lines("-elf", "-arch", f"sm_{arch}", library):
            if line.startswith(".nv.info."):
                symbol = line.strip().removeprefix(".nv.info.")
            elif "\tAttribute:" in line:
                attribute = line.split()[-1].removeprefix("EIATTR_")
            elif "\tValue:" in line and attribute in (_CAP, _THREADS, _ARGUMENTS):
                numbers = [int(number, 16) for number in line.split()[1:]]
                found[symbol][attribute] = math.prod(numbers)
        return found

    def _opcodes(self, library: Path, arch: int) -> defaultdict[str, Counter[str]]:
        """How often each instruction occurs, by kernel."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        symbol = ""
        for line in self._lines("-sass", "-arch", f"sm_{arch}", library):
            if "\tFunction : " in line:
                symbol = line.split()[-1]
            elif (instruction := _INSTRUCTION.match(line)) is not None:
                found[symbol][instruction[1]] += 1
        return found


def _release(text: str) -> str:
    """Two numbers, as in "13.0", from what a tool of CUDA says about itself."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found is not None else "unknown"


def _kernel(
    symbol: str, arch: int, usage: Sequence[int], own: dict[str, int], opcodes: Counter[str]
) -> Kernel:
    registers, stack, shared, local = usage
    reserved = RESERVED_SHARED_BYTES if arch >= 90 and shared else 0
    for what, is_there in (
        ("instructions in -sass", bool(opcodes)),
        (f"EIATTR_{_CAP} in -elf", _CAP in own),
        (f"EIATTR_{_ARGUMENTS} in -elf", _ARGUMENTS in own),
        (f"{reserved} bytes for the system among SHARED:{shared}", shared >= reserved),
    ):
        if not is_there:
            raise CannotCheckError(
                f"sm_{arch} {symbol}: expected {what}, got none. cuobjdump and nvdisasm of the "
                "compiler's release may know better."
            )
    return Kernel(
        symbol=symbol,
        arch=arch,
        registers=registers,
        register_cap=own[_CAP],
        threads=own.get(_THREADS, 1024),  # it may be launched with so many if it has no bounds
        stack_bytes=stack + local,
        argument_bytes=own[_ARGUMENTS],
        shared_bytes=shared - reserved,
        opcodes=opcodes,
    )
