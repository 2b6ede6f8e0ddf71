# SPDX-License-Identifier: BSD-3-Clause
"""Configures, builds and runs CMake projects as users do, in folders below build/consumer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from torchfuse import _loader

ROOT = Path(__file__).resolve().parents[3]
#: Where the Makefile built the package that is installed.
_BUILT = "build/dev-cuda" if _loader.recorded_build()["cuda"] else "build/dev"
BUILD = ROOT / os.environ.get("TORCHFUSE_BUILD_DIR", _BUILT)
WORK = ROOT / "build/consumer"
TORCH = Path(torch.__file__).resolve().parent
VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])


def environment(**changes: str) -> dict[str, str]:
    """Ours, without what could help a program to find its libraries or CMake to find torch."""
    hidden = {"LD_LIBRARY_PATH", "LIBRARY_PATH", "CMAKE_PREFIX_PATH", "TORCHFUSE_TORCH_DIR"}
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**kept, **changes}


def run(
    *command: str | Path, cwd: Path = WORK, env: Mapping[str, str] | None = None, ok: bool = True
) -> str:
    """Output of a command that must succeed, or must fail where not `ok`."""
    cwd.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment() if env is None else env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if (result.returncode == 0) != ok:
        expected = "success" if ok else "failure"
        pytest.fail(f"{command}: expected {expected}, got {result.returncode}\n{result.stdout}")
    return result.stdout


def run_in_processes(processes: int, *command: str | Path) -> str:
    """Output of a command that torchrun starts in so many processes, on the CPU."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return run(
        *("timeout", "240", *torchrun, "--nproc-per-node", str(processes), *command),
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
    )


def configure(
    source: Path,
    build: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    ok: bool = True,
    fresh: bool = True,
) -> str:
    """Configures; where `fresh`, so that nothing is found because an earlier run found it."""
    if fresh:
        shutil.rmtree(build, ignore_errors=True)
    return run("cmake", "-S", source, "-B", build, "-G", "Ninja", *arguments, env=env, ok=ok)


def build_consumer(name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Path:
    """The program of tests/packaging/consumer, configured and built with these arguments."""
    build = WORK / name
    configure(ROOT / "tests/packaging/consumer", build, *arguments, env=env)
    run("cmake", "--build", build, env=env)
    return build / "consumer"


def run_consumer(program: Path, torch_root: Path) -> None:
    """All its checks pass, with the libraries of this torch alone."""
    bare = {"PATH": "/nowhere"}
    expected = f"consumer: trained with torchfuse {VERSION}, built with torch {torch.__version__}\n"
    assert run(program, env=bare) == expected
    ours = set(os.listdir(torch_root / "lib"))
    loaded = {
        line.split()[0]: Path(line.split()[2])
        for line in run("ldd", program).splitlines()
        if " => " in line and line.split()[0] in ours
    }
    assert {"libtorch_cpu.so", "libc10.so", "libtorch.so"} <= set(loaded)
    assert any(name.startswith("libgomp") for name in loaded)
    for name, path in loaded.items():
        assert path.resolve() == (torch_root / "lib" / name).resolve(), f"{name} is {path}"


def make_libtorch(folder: Path) -> Path:
    """A LibTorch folder as its archive unpacks, made of links to the torch of this interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    for library in (TORCH / "lib").glob("*.so*"):
        (folder / "lib" / library.name).symlink_to(library)
    for part in ("include", "share"):
        (folder / part).symlink_to(TORCH / part)
    (folder / "build-version").write_text(f"{torch.__version__}\n", encoding="utf-8")
    # The wheel's torch looks for CUDA's libraries here.
    beside = folder.parent / "nvidia"
    if (TORCH.parent / "nvidia").is_dir() and not beside.is_symlink():
        beside.symlink_to(TORCH.parent / "nvidia")
    return folder
