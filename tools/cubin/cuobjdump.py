# SPDX-License-Identifier: BSD-3-Clause
"""Reads each CUDA kernel's figures from a library with NVIDIA's cuobjdump.

-res-usage  registers, stack and shared memory
-elf        launch bounds and argument size, as attributes in .nv.info.<kernel>
-sass       instructions; takes a minute for the library

Kernels have short names, such as fused_update<Adam, bf16, fp32, fp32, master, aligned>.
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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# From sm_90 on, the system reserves this much of each block's shared memory. cuobjdump includes the
# reserved bytes if an image uses shared memory at all.
RESERVED_SHARED_BYTES = 1024

_USAGE = re.compile(
    r"^arch = sm_(\d+)$|^ Function (\S+):\n +REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+) ",
    re.MULTILINE,
)
# Matches `/*0070*/ @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;`, but not the encoding at the end.
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([^\s;]+)")
_CAP, _THREADS, _ARGUMENTS = "MAXREG_COUNT", "MAX_THREADS", "CBANK_PARAM_SIZE"

_NAMESPACES = re.compile(r"\(anonymous namespace\)::|torchfuse::kernels::|cuda::|_kernel(?=<|$)")
DTYPES = {"float": "fp32", "double": "fp64", "Half": "fp16", "BFloat16": "bf16"}
_TYPE = re.compile(rf"\b({'|'.join(DTYPES)})\b")
# <TypedAccess<functor, param, grad, state, master>, aligned> or <LookedUpAccess<functor>, aligned>.
# A measure kernel has one form.
_OPTIMIZER = re.compile(
    r"^(\w+)<(?:Typed|(LookedUp))Access<(.*?)(?:, (true|false))?>(?:, (true|false)| )>$"
)


class CannotCheckError(Exception):
    """The kernels cannot be checked, because an input is missing or not understood."""


@dataclass(frozen=True)
class Kernel:
    """One kernel's code for one architecture."""

    registers: int
    register_cap: int  # registers per thread that launch bounds allow; 255 without bounds
    threads: int  # maximum per block
    stack_bytes: int
    argument_bytes: int
    shared_bytes: int
    opcodes: Counter[str]  # number of each instruction, such as {"LDG.E.EF.128": 4}

    @property
    def text_bytes(self) -> int:
        """Code size in bytes; since sm_70 an instruction has 16 bytes."""
        return 16 * self.opcodes.total()

    def count(self, operation: str, *modifiers: str) -> int:
        """Returns how many instructions with this operation have all of the modifiers."""
        return sum(
            number
            for opcode, number in self.opcodes.items()
            if (words := opcode.split("."))[0] == operation and {*modifiers} <= {*words}
        )


#: A library's kernels by short name and architecture.
Figures = dict[str, dict[int, Kernel]]


def find_cuobjdump(nvcc: str | None) -> Path:
    """Returns cuobjdump's path beside nvcc, or in triton, which torch for CUDA installs."""
    triton = find_spec("triton")
    inside = (triton and triton.submodule_search_locations) or ()
    folders = [Path(nvcc).resolve().parent] if nvcc else []
    folders += [Path(folder, "backends/nvidia/bin") for folder in inside]
    for folder in folders:
        if all(os.access(folder / tool, os.X_OK) for tool in ("cuobjdump", "nvdisasm")):
            return folder / "cuobjdump"
    raise CannotCheckError(
        "expected cuobjdump and nvdisasm beside nvcc or in triton, got neither. Install CUDA, or "
        "nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm from PyPI."
    )


def read(cuobjdump: Path, library: Path) -> tuple[Figures, str]:
    """Returns a library's kernels and the compiler's release."""
    usage: dict[int, list[tuple[str, ...]]] = defaultdict(list)
    arch = 0
    for named, *kernel in _USAGE.findall("".join(_lines(cuobjdump, "-res-usage", library))):
        if named:
            arch = int(named)
        else:
            usage[arch].append(tuple(kernel))
    figures: Figures = defaultdict(dict)
    compiler = "unknown"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = pool.map(lambda arch: _opcodes(cuobjdump, library, arch), usage)
        attributes = pool.map(lambda arch: _attributes(cuobjdump, library, arch), usage)
        for arch, code, (own, release) in zip(usage, codes, attributes, strict=True):
            compiler = release
            names = _short_names([symbol for symbol, *_ in usage[arch]])
            for name, (symbol, *numbers) in zip(names, usage[arch], strict=True):
                if arch in figures[name]:
                    raise CannotCheckError(f"expected one kernel {name} for sm_{arch}, got two.")
                figures[name][arch] = _kernel(
                    name, arch, [*map(int, numbers)], own[symbol], code[symbol]
                )
    for name, by_arch in figures.items():
        if missing := usage.keys() - by_arch.keys():
            raise CannotCheckError(f"expected kernel {name} for sm_{min(missing)}, got none.")
    return dict(sorted(figures.items())), compiler


def _kernel(
    name: str, arch: int, usage: Sequence[int], own: dict[str, int], opcodes: Counter[str]
) -> Kernel:
    registers, stack, shared, local = usage
    shared -= RESERVED_SHARED_BYTES if arch >= 90 and shared else 0
    if not opcodes or _CAP not in own or _ARGUMENTS not in own or shared < 0:
        raise CannotCheckError(
            f"expected instructions, {_CAP}, {_ARGUMENTS} and the system's shared memory of "
            f"{name} for sm_{arch}, got less. Use the compiler's cuobjdump."
        )
    threads = own.get(_THREADS, 1024)  # without bounds, up to 1024 threads may be launched
    return Kernel(registers, own[_CAP], threads, stack + local, own[_ARGUMENTS], shared, opcodes)


def _lines(cuobjdump: Path, *arguments: str | Path) -> Iterator[str]:
    """Yields cuobjdump's output lines, which are too many to hold in memory."""
    command = [str(argument) for argument in (cuobjdump, *arguments)]
    with tempfile.TemporaryFile("w+") as errors:  # nvdisasm prints a warning for every image
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            yield from process.stdout
        if process.returncode != 0:
            errors.seek(0)
            status = f"exit status {process.returncode}: {errors.read()}"
            raise CannotCheckError(f"{' '.join(command)}: {status}")


def _attributes(
    cuobjdump: Path, library: Path, arch: int
) -> tuple[defaultdict[str, dict[str, int]], str]:
    """Returns attributes by kernel and name, and the compiler's release ("unknown" for nvcc 12).

    An attribute with several numbers is replaced by the product.
    """
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    symbol = attribute = ""
    compiler = "unknown"
    for line in _lines(cuobjdump, "-elf", "-arch", f"sm_{arch}", library):
        if line.startswith(".nv.info."):
            symbol = line.strip().removeprefix(".nv.info.")
        elif "\tAttribute:" in line:
            attribute = line.split()[-1].removeprefix("EIATTR_")
        elif "\tValue:" in line and attribute in (_CAP, _THREADS, _ARGUMENTS):
            numbers = [int(number, 16) for number in line.split()[1:]]
            found[symbol][attribute] = math.prod(numbers)
        elif "Tool Version:" in line and (release := re.search(r"release (\d+\.\d+)", line)):
            compiler = release[1]
    return found, compiler


def _opcodes(cuobjdump: Path, library: Path, arch: int) -> defaultdict[str, Counter[str]]:
    """Returns how often each instruction occurs, by kernel."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    symbol = ""
    for line in _lines(cuobjdump, "-sass", "-arch", f"sm_{arch}", library):
        if "\tFunction : " in line:
            symbol = line.split()[-1]
        elif (instruction := _INSTRUCTION.match(line)) is not None:
            found[symbol][instruction[1]] += 1
    return found


def _short_names(symbols: Sequence[str]) -> list[str]:
    """Returns kernels' short names; needs binutils' c++filt, which drops the parameters."""
    names = subprocess.check_output(["c++filt", "-p"], text=True, input="\n".join(symbols))
    return [short_name(name) for name in names.splitlines()]


def short_name(declaration: str) -> str:
    """Returns a demangled kernel's short name."""
    name = _TYPE.sub(lambda match: DTYPES[match[0]], _NAMESPACES.sub("", declaration))
    # The size of the arguments is a template argument of kernels that have a form for short lists.
    name, short = re.subn(r", 4096ul>$", ">", re.sub(r", 32764ul>$", ">", name))
    name, averages = re.subn(r"EmaAccess<(.*) >(?=, (?:true|false)>$)", r"\1", name)
    match = _OPTIMIZER.match(name)
    if match is None:
        return f"{name[:-1]}, short>" if short else name
    kernel, looked_up, types, master, aligned = match.groups()
    parts = {"looked up": looked_up, "master": master == "true", "ema": averages, "short": short}
    parts |= {"aligned": aligned == "true", "misaligned": aligned == "false"}
    return f"{kernel}<{', '.join([types, *(word for word, said in parts.items() if said)])}>"
