# SPDX-License-Identifier: BSD-3-Clause
"""Python environments to install into, and what an installation of torchfuse must leave in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
#: Beside the checkout's other build folders, so that torch's files can be linked instead of copied.
WORK = ROOT / "build/packaging"

#: For another build from the same sources. A compiler cache has the objects of the first one, made
#: with the same options; without a cache less is compiled, and without the optimizer.
ANOTHER_BUILD: Mapping[str, str] = (
    {}
    if os.environ.get("CMAKE_CUDA_COMPILER_LAUNCHER")
    else {"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_RELEASE=-O0", "TORCHFUSE_WITH_CUDA": "OFF"}
)

_STEP = """
import torch, torchfuse

weight = torch.nn.Parameter(torch.ones(64))
optimizer = torchfuse.optimizers.FusedAdam([weight], lr=0.1)
scaler = torchfuse.amp.GradScaler(device="cpu")
scaler.scale(weight.square().sum()).backward()
scaler.step(optimizer)
scaler.update()
torch.testing.assert_close(weight.detach(), torch.full((64,), 0.9), rtol=0, atol=1e-4)
print("stepped with torchfuse of", torchfuse.__path__[0])
"""


class CommandError(AssertionError):
    """A command failed; the message is its output."""


def run(command: Sequence[str | Path], *, cwd: Path = WORK, **variables: str | None) -> str:
    """Runs a command and returns all that it printed; variables that are None are removed."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PWD": str(cwd)}
    # pip builds in a new folder each time. A compiler cache, where there is one, knows files by
    # their places relative to the build folder: the same here as in the checkout beside it.
    environment["TMPDIR"] = str(WORK)
    # Nothing is activated: not even the environment that runs the tests.
    folders = os.environ["PATH"].split(os.pathsep)
    outside = [x for x in folders if not Path(x).parent.joinpath("pyvenv.cfg").exists()]
    environment["PATH"] = os.pathsep.join(outside)
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TORCHFUSE_TORCH_DIR")
    for name in (*hidden, "TORCHFUSE_WITH_CUDA"):
        environment.pop(name, None)
    for name, value in variables.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    result = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
    )
    if result.returncode != 0:
        raise CommandError(f"{command} failed with status {result.returncode}:\n{result.stdout}")
    return result.stdout


def one_line(text: str) -> str:
    """The text without line breaks and without pip's margin."""
    return " ".join(re.sub(r"^ *│", "", text, flags=re.MULTILINE).split())


class Environment:
    """A virtual environment below WORK."""

    def __init__(self, name: str, python: str | Path = sys.executable) -> None:
        self.prefix = WORK / name
        run([python, "-m", "venv", self.prefix])
        self.python = self.prefix / "bin/python"
        code = "import sysconfig; print(sysconfig.get_path('platlib'))"
        self.site_packages = Path(run([self.python, "-c", code]).strip())

    def pip(self, *arguments: str | Path, **variables: str | None) -> str:
        """Runs pip; it must build, and not reuse a wheel of another test."""
        options = ["--no-cache-dir"] if arguments[0] == "install" else []
        command = [self.python, "-m", "pip", arguments[0], *options, *arguments[1:]]
        return run(command, **variables)

    def files(self) -> set[str]:
        """All files but byte code and uv's lock, relative to site-packages; links are kept."""
        return {
            os.path.relpath(Path(folder, name), self.site_packages)
            for folder, _, names in os.walk(self.prefix)
            for name in names
            if name != ".lock" and not name.endswith(".pyc")
        }

    def step(self, **variables: str | None) -> str:
        """Trains one step away from any checkout; returns the folder of the package in use."""
        output = run([self.python, "-W", "error", "-c", _STEP], cwd=self.prefix, **variables)
        return output.strip().rpartition(" of ")[2]

    def report(self) -> str:
        """What `python -m torchfuse --env` prints."""
        return run([self.python, "-m", "torchfuse", "--env"], cwd=self.prefix)


class Plain(NamedTuple):
    """An environment after `pip install .`."""

    environment: Environment
    files_before: set[str]
    log: str


def _torch_entries() -> set[str]:
    """Top-level names in site-packages of torch and of everything it requires."""
    entries: set[str] = set()
    seen = {"pip", "setuptools"}
    queue = ["torch", "numpy"]
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
        entries |= {file.parts[0] for file in distribution.files or []}
        for requirement in distribution.requires or []:
            # The extras of cuda-toolkit are torch's CUDA libraries; those of others are not needed.
            if name == "cuda-toolkit" or "extra ==" not in requirement:
                queue.append(re.split(r"[^\w.-]", requirement)[0])
    return {entry for entry in entries if entry not in ("..", "__pycache__")}


def _put_torch(folder: Path, put: Callable[[Path, Path], object], source: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in _torch_entries():
        # Copies of the metadata, because an installer may rewrite it in place.
        if entry.endswith(".dist-info"):
            shutil.copytree(source / entry, folder / entry)
        elif (source / entry).exists():
            put(source / entry, folder / entry)


def hard_link_torch(folder: Path) -> None:
    """Puts torch into a folder as an installer would: real folders, real files."""

    def put(source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, copy_function=os.link)
        else:
            os.link(source, target)

    torch = metadata.distribution("torch").locate_file("")
    _put_torch(folder, put, Path(str(torch)))


def symlink_torch(folder: Path, source: Path) -> None:
    """Puts another environment's torch into a folder: objects compiled for it can be shared."""
    _put_torch(folder, lambda path, link: link.symlink_to(path), source)


def copy_checkout(target: Path) -> Path:
    """Copies what git knows or would know: the working tree without anything that was built."""
    listed = run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def extension_suffix(python: Path) -> str:
    """How a native module's file name ends, e.g. ".cpython-311-x86_64-linux-gnu.so"."""
    code = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    return run([python, "-c", code]).strip()


def expected_package(checkout: Path, suffix: str) -> set[str]:
    """All files of the installed package."""
    sources = checkout / "python/torchfuse"
    files = {
        f"torchfuse/{path.relative_to(sources)}"
        for pattern in ("**/*.py", "*.pyi", "py.typed")
        for path in sources.glob(pattern)
        if "lib" not in path.relative_to(sources).parts
    }
    public = checkout / "csrc/include/torchfuse"
    headers = {str(path.relative_to(public)) for path in public.glob("**/*.h")}
    headers |= {"export.h", "version.h"}
    cmake = {
        *("FindTorchfuseTorch.cmake", "TorchfuseLocateTorch.cmake", "torch_search_path.py"),
        *("torchfuseConfig.cmake", "torchfuseConfigVersion.cmake"),
        *("torchfuseTargets.cmake", "torchfuseTargets-release.cmake"),
    }
    return (
        files
        | {f"torchfuse/_C{suffix}", "torchfuse/build_info.json"}
        | {f"torchfuse/lib/libtorchfuse{part}.so" for part in ("", "_kernels")}
        | {f"torchfuse/include/torchfuse/{name}" for name in headers}
        | {f"torchfuse/lib/cmake/torchfuse/{name}" for name in cmake}
    )


def check_installed_since(environment: Environment, before: set[str], checkout: Path) -> None:
    """The new files must be the package, and the files that describe it to pip."""
    new = environment.files() - before
    described = {name for name in new if name.startswith("torchfuse-")}
    assert {Path(name).name for name in described} >= {"METADATA", "RECORD", "LICENSE"}
    assert new - described == expected_package(checkout, extension_suffix(environment.python))
