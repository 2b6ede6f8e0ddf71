# SPDX-License-Identifier: BSD-3-Clause
"""Compiles the CUDA sources of a build to cubins, with the build's own compiler and flags."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cubin.elf import Kernel, read_kernels
from cubin.errors import CannotCheckError

_FALSE = re.compile(r"^(OFF|NO|FALSE|N|0|IGNORE|.*NOTFOUND|)$", re.IGNORECASE)
_RELEASE = re.compile(r"release (\d+\.\d+)")
# Options of the compile command that choose architectures or outputs, alone or with a value.
_DROPPED = re.compile(
    r"^(-c|-MD|--?(generate-code|gencode|gpu-architecture|gpu-code|arch|code)=.*)$"
)
_DROPPED_WITH_VALUE = {"-o", "-MF", "-MT", "-gencode", "--generate-code", "-arch", "-code"}


@dataclass(frozen=True)
class Source:
    """One .cu file and how to compile it: `command` lacks architecture and output."""

    stem: str
    command: tuple[str, ...]
    directory: Path
    architectures: frozenset[int]  # that the build makes machine code for


@dataclass(frozen=True)
class Compiled:
    """One cubin and what the compiler said while it made it."""

    kernels: list[Kernel]
    log: str


def reason_for_no_cuda(build_dir: Path) -> str | None:
    """Why the build has no CUDA, from its CMake cache; None if it has.

    Raises:
        CannotCheckError: the folder holds no configured build.
    """
    path = build_dir / "CMakeCache.txt"
    if not path.is_file():
        raise CannotCheckError(f"expected a build folder with {path}, got none. Run make build.")
    cache_text = path.read_text(encoding="utf-8")
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", cache_text, re.MULTILINE))
    wish = entries.get("TORCHFUSE_WITH_CUDA", "")
    if _FALSE.match(wish):
        return f"TORCHFUSE_WITH_CUDA={wish}"
    if wish.upper() == "AUTO" and _FALSE.match(entries.get("CMAKE_CUDA_COMPILER", "")):
        return "TORCHFUSE_WITH_CUDA=AUTO found no CUDA to build with"
    return None


def _source(entry: dict[str, str], target: str) -> Source | None:
    """The compile command of one .cu file of the target; None for any other file."""
    words = shlex.split(entry["command"])
    if not entry["file"].endswith(".cu") or "-o" not in words:
        return None
    _, found, output = words[words.index("-o") + 1].partition(f"{target}.dir/")
    if not found:
        return None
    command, dropped = [], []
    rest = iter(words)
    for word in rest:
        if word in _DROPPED_WITH_VALUE:
            dropped.append(next(rest))
        elif _DROPPED.match(word):
            dropped.append(word)
        else:
            command.append(word)
    architectures = frozenset(map(int, re.findall(r"\bsm_(\d+)", " ".join(dropped))))
    stem = output.removesuffix(".o").removesuffix(".cu").replace("/", ".")
    return Source(stem, tuple(command), Path(entry["directory"]), architectures)


def cuda_sources(build_dir: Path, target: str) -> list[Source]:
    """The .cu files of a CMake target, from compile_commands.json.

    Raises:
        CannotCheckError: there are none, though the build has CUDA.
    """
    path = build_dir / "compile_commands.json"
    if not path.is_file():
        raise CannotCheckError(
            f"expected {path}, got no such file. Configure with CMAKE_EXPORT_COMPILE_COMMANDS=ON."
        )
    entries = json.loads(path.read_text(encoding="utf-8"))
    sources = [source for entry in entries if (source := _source(entry, target)) is not None]
    if not sources:
        raise CannotCheckError(f"expected .cu files of target {target} in {path}, got none.")
    return sources


def nvcc_version(nvcc: str) -> str:
    """The compiler's own description of its version.

    Raises:
        CannotCheckError: it does not run.
    """
    try:
        run = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotCheckError(f"expected nvcc at {nvcc}, got: {error}.") from error
    return run.stdout


def release_of(version: str) -> str:
    """Two numbers, as in "13.0", from the compiler's description."""
    match = _RELEASE.search(version)
    if match is None:
        raise CannotCheckError(f"expected 'release <number>' from nvcc, got {version!r}.")
    return match.group(1)


class Compiler:
    """Makes cubins in a folder and keeps those whose inputs have not changed."""

    def __init__(self, folder: Path, version: str, jobs: int) -> None:
        self._folder = folder
        self._version = version
        self._jobs = jobs
        # Many files include the same headers.
        self._state_of = cache(_state_of)

    def compile(
        self, sources: Sequence[Source], architectures: Sequence[int]
    ) -> dict[tuple[str, int], Compiled]:
        """Compiles every source for every architecture; keys are stem and architecture.

        Raises:
            CannotCheckError: a source does not compile.
        """
        tasks = [(source, arch) for source in sources for arch in architectures]
        with ThreadPoolExecutor(self._jobs) as pool:
            results = pool.map(lambda task: self._compile_one(*task), tasks)
            return {
                (s.stem, arch): result for (s, arch), result in zip(tasks, results, strict=True)
            }

    def _compile_one(self, source: Source, arch: int) -> Compiled:
        folder = self._folder / f"sm_{arch}"
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / f"{source.stem}.cubin"
        depfile = output.with_suffix(".d")
        command = [
            *source.command,
            *("-cubin", "-gencode", f"arch=compute_{arch},code=sm_{arch}"),
            *("-MD", "-MF", str(depfile), "-o", str(output)),
        ]
        key = hashlib.sha256(json.dumps([command, self._version]).encode()).hexdigest()
        stamp = output.with_suffix(".json")
        log = self._kept_log(stamp, key)
        if log is None:
            stamp.unlink(missing_ok=True)
            log = _run(command, source.directory, f"sm_{arch} {source.stem}")
            states = {path: self._state_of(path) for path in _dependencies(depfile, source)}
            stamp.write_text(json.dumps({"key": key, "log": log, "inputs": states}))
        try:
            kernels = read_kernels(output.read_bytes())
        except CannotCheckError as error:
            raise CannotCheckError(f"{output}: {error}") from error
        for kernel in kernels:
            if kernel.arch != arch:
                raise CannotCheckError(f"{output}: expected sm_{arch}, got sm_{kernel.arch}.")
        return Compiled(kernels, log)

    def _kept_log(self, stamp: Path, key: str) -> str | None:
        """What the compiler said, if the cubin beside `stamp` is still right."""
        if not stamp.is_file():
            return None
        record = json.loads(stamp.read_text())
        if record["key"] != key:
            return None
        states = record["inputs"].items()
        current = all(self._state_of(path) == state for path, state in states)
        return str(record["log"]) if current else None


def _state_of(path: str) -> list[int]:
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        return []
    return [status.st_mtime_ns, status.st_size]


def _dependencies(depfile: Path, source: Source) -> list[str]:
    rule = depfile.read_text(encoding="utf-8").replace("\\\n", " ")
    return [str(source.directory / path) for path in shlex.split(rule.partition(" : ")[2])]


def _run(command: list[str], directory: Path, what: str) -> str:
    try:
        run = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    except OSError as error:
        raise CannotCheckError(f"expected nvcc at {command[0]}, got: {error}.") from error
    if run.returncode != 0:
        raise CannotCheckError(
            f"{what}: expected to compile, got exit status {run.returncode}:\n{run.stderr}"
            f"Choose architectures that this nvcc knows with --arch.\n"
        )
    return run.stderr + run.stdout
