# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torchfuse`: reports on the installation.

The reports also work when torch or the native library fails to load, which is when users need the
reports most. So the functions below import torch and torchfuse._C locally.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from pathlib import Path

from torchfuse import _loader

PACKAGE = Path(__file__).resolve().parent
CMAKE_DIR = PACKAGE / "lib" / "cmake" / "torchfuse"

# Environment variables besides TORCHFUSE_* that affect builds, loading or measurements.
_VARIABLES = (
    *("CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_NUM_THREADS"),
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CUDA_ARCH_LIST"),
)


def _build() -> dict[str, str]:
    return {f"built: {key}": str(value) for key, value in _loader.recorded_build().items()}


def _torch() -> dict[str, str]:
    import torch

    return {
        "torch": torch.__version__,
        "torch's cuda": torch.version.cuda or "none",
        "cpu threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
        **{
            f"gpu {index}": _describe_gpu(torch.cuda.get_device_properties(index))
            for index in range(torch.cuda.device_count())
        },
    }


def _describe_gpu(gpu: object) -> str:
    major, minor, memory = (getattr(gpu, key) for key in ("major", "minor", "total_memory"))
    return f"{getattr(gpu, 'name', '')}, capability {major}.{minor}, {memory / 2**30:.0f} GiB"


def _library() -> dict[str, str]:
    _loader.load()
    from torchfuse import _C

    folder = str(Path(_C.__file__).parent)
    return {"native library": "loads", "loaded from": folder, "cpu level in use": _C.cpu_isa()}


def _first_line(path: str, start: str) -> str:
    """Returns the text after `start` from the first line that begins with `start`, or "none"."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "none"
    return next(
        (line[len(start) :].strip(" \t:") for line in lines if line.startswith(start)), "none"
    )


def _machine() -> dict[str, str]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpu": _first_line("/proc/cpuinfo", "model name"),
        "nvidia driver": _first_line("/proc/driver/nvidia/version", "NVRM version"),
        "package": str(PACKAGE),
        **{
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith("TORCHFUSE_")
        },
    }


def describe_environment() -> dict[str, str]:
    """Describes the build, torch, the native library and the machine, one line for each value.

    If a section cannot be determined, the section's entry contains the error.
    """
    parts: dict[str, Callable[[], dict[str, str]]] = {
        "build": _build,
        "torch": _torch,
        "native library": _library,
        "machine": _machine,
    }
    described: dict[str, str] = {}
    for name, describe in parts.items():
        try:
            described |= describe()
        except Exception as error:
            described[name] = f"{type(error).__name__}: {error}"
    return {key: " ".join(value.split()) or "none" for key, value in described.items()}


def format_report(described: dict[str, str]) -> str:
    """Formats a report as a Markdown code block, ready to be pasted into an issue."""
    width = max(len(key) for key in described)
    lines = [f"{key:<{width}}  {value}" for key, value in described.items()]
    return "\n".join(["```text", *lines, "```"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchfuse",
        description="Reports on the installation of torchfuse.",
        epilog="To run a program written for apex: python -m torchfuse.apex script.py",
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--version", action="store_true", help="print the version of torchfuse")
    choice.add_argument("--env", action="store_true", help="print a block for bug reports")
    choice.add_argument(
        "--cmake-dir", action="store_true", help="print the value for CMake's torchfuse_DIR"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.version:
        print(_loader.version())
    elif options.cmake_dir:
        print(CMAKE_DIR)
    else:
        print(format_report(describe_environment()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
