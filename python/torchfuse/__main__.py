# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torchfuse`: what this installation is, for bug reports and for CMake."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import torch

import torchfuse
from torchfuse import _C, _loader

CMAKE_DIR = Path(__file__).resolve().parent / "lib" / "cmake" / "torchfuse"


def describe_environment() -> dict[str, str]:
    """What was built, with what, and what it runs in; every value is one line."""
    built = {f"built: {key}": str(value) for key, value in _loader.recorded_build().items()}
    cuda_devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    running = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch's cuda": torch.version.cuda or "none",
        "cuda devices": ", ".join(cuda_devices) or "none",
        "cpu level in use": _C.cpu_isa(),
        "cpu threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
        "package": str(Path(__file__).resolve().parent),
    }
    return {key: value or "none" for key, value in (built | running).items()}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchfuse", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--version", action="store_true", help="version of torchfuse")
    choice.add_argument("--env", action="store_true", help="what was built and what it runs in")
    choice.add_argument(
        "--cmake-dir", action="store_true", help="value for CMake's torchfuse_DIR variable"
    )
    options = parser.parse_args(arguments)
    if options.version:
        print(torchfuse.__version__)
    elif options.cmake_dir:
        print(CMAKE_DIR)
    else:
        environment = describe_environment()
        width = max(len(key) for key in environment)
        for key, value in environment.items():
            print(f"{key:<{width}}  {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
