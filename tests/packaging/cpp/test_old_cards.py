# SPDX-License-Identifier: BSD-3-Clause
"""Kernels of each kind compile for the oldest cards, which the default build leaves out."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cmake_project import BUILD

# One of each kind of kernel: with and without atomics, conversions of 16-bit types, tables in the
# arguments, shared memory.
KINDS = (
    "amp_update_scale_cuda.cu",
    "prologue_cuda.cu",
    "multi_tensor_unscale_cuda.cu",
    "softmax_cross_entropy_cuda.cu",
    "fused_lion_cuda.cu",
)


def compilations() -> dict[str, dict[str, Any]]:
    """What the build says about its CUDA sources, by their names."""
    entries = json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8"))
    return {
        Path(entry["file"]).name: entry
        for entry in entries
        if "torchfuse_kernels_plain.dir" in entry["command"] and entry["file"].endswith(".cu")
    }


def for_card(command: str, architecture: int, cubin: Path) -> list[str]:
    """The command for machine code of one architecture, with the use of registers."""
    words = [word for word in shlex.split(command) if not word.startswith("--generate-code")]
    words = [word for word in words if word not in ("-c", "--compress-mode=size")]
    words[words.index("-o") + 1] = str(cubin)
    return [*words, "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v"]


def oldest_of(nvcc: str) -> int:
    """The oldest architecture that nvcc knows and kernels allow."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return min(n for n in map(int, re.findall(r"compute_(\d+)", known.stdout)) if n >= 70)


@pytest.mark.parametrize("source", KINDS)
def test_kernels_compile_without_spills(source: str, tmp_path: Path) -> None:
    known = compilations()
    if not known:
        pytest.skip("torchfuse was built without CUDA")
    entry = known[source]
    architecture = oldest_of(shlex.split(entry["command"])[0])
    assert architecture <= 75
    result = subprocess.run(
        for_card(entry["command"], architecture, tmp_path / "kernels.cubin"),
        cwd=entry["directory"],
        capture_output=True,
        text=True,
        check=False,
    )
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    assert (tmp_path / "kernels.cubin").stat().st_size > 0
    kernels = re.findall(rf"Compiling entry function '(\w+)' for 'sm_{architecture}'", printed)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    assert kernels
    assert spills == [("0", "0")] * len(kernels)
