# SPDX-License-Identifier: BSD-3-Clause
"""What the suite needs: found, or named together with the remedy before anything is started."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROBE = Path(__file__).with_name("probe.py")
PROBE_SECONDS = 120
DEBIAN_GTEST = Path("/usr/src/googletest")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts from the probe, and where the tools are; a tool that is absent is None."""

    facts: Mapping[str, Any]
    tools: Mapping[str, str | None]
    gtest_source: Path | None
    cores: int

    def has(self, package: str) -> bool:
        """Whether Python can import a package."""
        return package in self.facts["packages"]

    @property
    def gpu(self) -> Mapping[str, Any] | None:
        """The GPU, or None."""
        gpu: Mapping[str, Any] | None = self.facts.get("gpu")
        return gpu

    @property
    def pretends(self) -> bool:
        """Whether the GPU is the pretended one of tests/pretended_cuda."""
        return bool(self.facts.get("pretended"))


def run_probe(environment: Mapping[str, str]) -> dict[str, Any]:
    """What probe.py says; if it dies or hangs, torch counts as missing, with that as the reason."""
    command = [sys.executable, str(PROBE)]
    error: str
    try:
        answer = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        error = f"`import torch` or its search for a GPU took more than {PROBE_SECONDS} s"
    else:
        if answer.returncode == 0:
            facts: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
            return facts
        error = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
    return {"torch": None, "torch_error": error, "packages": [], "python": None, "cpu": None}


def _cuda_folders(environment: Mapping[str, str], facts: Mapping[str, Any]) -> list[str]:
    """Where CMake looks for nvcc too, and where the toolkit keeps compute-sanitizer."""
    homes = [environment.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [os.path.join(home, "bin") for home in homes if home]
    folders += ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    if facts.get("torch_root") and facts.get("cuda"):
        major = facts["cuda"].partition(".")[0]
        folders.append(os.path.join(facts["torch_root"], f"../nvidia/cu{major}/bin"))
    return folders


def inspect(environment: Mapping[str, str], gtest_source: Path | None) -> Machine:
    """Looks for everything; decides nothing."""
    facts = run_probe(environment)
    scripts = sysconfig.get_path("scripts")
    path = environment.get("PATH", "")
    host = os.pathsep.join([scripts, path])
    cuda = os.pathsep.join([path, *_cuda_folders(environment, facts)])
    tools = {name: shutil.which(name, path=host) for name in ("cmake", "ctest", "ninja")}
    tools["c++"] = shutil.which(shlex.split(environment.get("CXX") or "c++")[0], path=path)
    tools["nvcc"] = shutil.which(environment.get("CUDACXX") or "nvcc", path=cuda)
    for name in ("compute-sanitizer", "ncu"):
        tools[name] = shutil.which(name, path=cuda)
    if gtest_source is None and (DEBIAN_GTEST / "CMakeLists.txt").is_file():
        gtest_source = DEBIAN_GTEST
    return Machine(facts, tools, gtest_source, len(os.sched_getaffinity(0)))


def _missing_tools(machine: Machine, with_cuda: bool) -> list[str]:
    remedies = {
        "cmake": "not beside Python and not on PATH. Run `pip install cmake`.",
        "ctest": "not beside Python and not on PATH. It comes with cmake: `pip install cmake`.",
        "ninja": "not beside Python and not on PATH. Run `pip install ninja`.",
        "c++": "no C++ compiler on PATH. Install g++ 12 or newer, or set CXX.",
    }
    if with_cuda:
        remedies["nvcc"] = (
            "not on PATH, in CUDA_HOME or in /usr/local/cuda. Install the CUDA toolkit of torch's "
            "major version, or set CUDA_HOME."
        )
    return [f"{name}: {text}" for name, text in remedies.items() if machine.tools[name] is None]


def missing(machine: Machine, with_cuda: bool) -> list[str]:
    """One line for each thing that is missing, with its remedy."""
    lines = _missing_tools(machine, with_cuda)
    facts = machine.facts
    if facts["torch"] is None:
        lines.append(
            f"torch: {sys.executable} cannot import it: {facts['torch_error']}. "
            "Install torch 2.11 or newer, or set PYTHON to an interpreter that has it."
        )
    elif with_cuda and facts["cuda"] is None:
        lines.append(f"torch with CUDA: torch {facts['torch']} has none. Install a CUDA build.")
    if with_cuda and machine.gpu is None:
        lines.append(
            "GPU: torch sees none. Run this on a machine with an NVIDIA GPU and its driver, or try "
            "the suite without one: --without-cuda."
        )
    if not machine.has("pytest"):
        lines.append("pytest: Python cannot import it. Run `pip install pytest`.")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        lines.append("Python.h: Python's headers are not installed. Install python3-dev.")
    source = machine.gtest_source
    if source is None or not (source / "CMakeLists.txt").is_file():
        where = "not set" if source is None else f"{source} has no CMakeLists.txt"
        lines.append(
            f"GoogleTest: TORCHFUSE_GTEST_SOURCE or --gtest-source: {where}. "
            "Name the source folder of GoogleTest 1.14 or newer."
        )
    return lines


def nvcc_release(nvcc: str) -> str | None:
    """Release of nvcc, such as 13.0."""
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+\.\d+)", answer.stdout)
    return match.group(1) if match else None
