# SPDX-License-Identifier: BSD-3-Clause
"""Which tests catch the faults of faults.jsonl, in a clone whose sources it overwrites.

    git clone . build/clone
    python tests/mutations/faults.py plant build/clone
    cd build/clone && cmake -G Ninja -B build/faults -DTORCHFUSE_BUILD_TESTS=ON \
        -DCMAKE_CXX_FLAGS="-include $PWD/fault.h" && cmake --build build/faults
    cmake --install build/faults --prefix python/torchfuse --component python; cd -
    python tests/mutations/faults.py run build/clone [NUMBER ...]

All faults of C++ are in one build, and TORCHFUSE_FAULT chooses one; of Python one is written at a
time. The cheapest programs that could see a fault run first, and the first that fails ends its run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HEADER = """\
#pragma once
#ifdef __cplusplus
#include <cstdlib>
[[maybe_unused]] static const int torchfuse_fault = [] {
  const char* value = std::getenv("TORCHFUSE_FAULT");
  return value == nullptr ? 0 : std::atoi(value);
}();
[[gnu::always_inline]] static constexpr bool tf_fault(int number) {
  return !__builtin_is_constant_evaluated() && torchfuse_fault == number;
}
#define TF_FAULT(number) tf_fault(number)
#endif
"""
FAULTS = {
    fault["id"]: fault
    for fault in map(json.loads, Path(__file__).with_name("faults.jsonl").read_text().splitlines())
}
PROGRAMS = {
    "functors": ["torchfuse_kernel_tests", "kernels/cuda/torchfuse_cuda_on_cpu_tests"],
    "cpu": ["torchfuse_kernel_tests"],
    "cuda": ["kernels/cuda/torchfuse_cuda_on_cpu_tests"],
}


def write(clone: Path, numbers: list[int]) -> None:
    """Writes these faults, and no others, over the files of the clone's commit."""
    for file in {fault["file"] for fault in FAULTS.values()}:
        show = ["git", "-C", str(clone), "show", f"HEAD:{file}"]
        text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
        for fault in (FAULTS[number] for number in numbers if FAULTS[number]["file"] == file):
            if text.count(fault["find"]) != 1:
                raise ValueError(f"fault {fault['id']}: expected its text once in {file}.")
            text = text.replace(fault["find"], fault["replace"])
        if (clone / file).read_text() != text:
            (clone / file).write_text(text)


def catcher(clone: Path, fault: dict[str, object]) -> str | None:
    """Returns the program that fails with the fault; None if all pass."""
    layer = str(fault["layer"])
    programs = clone / "build/faults/tests/cpp"
    commands = [
        [str(programs / name), "--gtest_fail_fast", "--gtest_brief=1"]
        for name in PROGRAMS.get(layer, []) + (["torchfuse_api_tests"] if layer != "python" else [])
    ]
    commands.append([sys.executable, "-m", "pytest", "-x", "-q", str(clone / "tests/python")])
    number = "0" if layer == "python" else str(fault["id"])
    environment = {**os.environ, "TORCHFUSE_FAULT": number, "PYTHONPATH": str(clone / "python")}
    for command in commands:
        if subprocess.run(command, env=environment, cwd=clone, capture_output=True).returncode:
            return Path(command[0]).name if len(command) == 3 else "tests/python"
    return None


def main() -> None:
    what, clone = sys.argv[1], Path(sys.argv[2]).resolve()
    native = [number for number, fault in FAULTS.items() if fault["layer"] != "python"]
    if what == "plant":
        (clone / "fault.h").write_text(HEADER)
        return write(clone, native)
    for number in map(int, sys.argv[3:] or map(str, FAULTS)):
        fault = FAULTS[number]
        write(clone, native + ([number] if fault["layer"] == "python" else []))
        print(number, fault["layer"], catcher(clone, fault) or "is not caught", flush=True)
    return None


if __name__ == "__main__":
    main()
