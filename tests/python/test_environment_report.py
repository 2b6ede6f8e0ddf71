# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torchfuse --env`, also where the library does not load, and what import then says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchfuse
from torchfuse import __main__ as command_line
from torchfuse import _loader


def read_report(report: str) -> dict[str, str]:
    """The lines of the block, which must be one Markdown code block and nothing else."""
    lines = report.strip().splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    assert not any("```" in line for line in lines[1:-1])
    return {
        key.strip(): value.strip() for key, _, value in (x.partition("  ") for x in lines[1:-1])
    }


@pytest.fixture
def broken_package(tmp_path: Path) -> Path:
    """A copy of the package without its native library, said to be built with torch 2.99."""
    package = Path(torchfuse.__file__).parent
    copy = tmp_path / "torchfuse"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("*.so", "include", "lib", "__py*"))
    info = {**_loader.recorded_build(), "torch": "2.99.0+cu199"}
    (copy / "build_info.json").write_text(json.dumps(info), encoding="utf-8")
    return copy


def run(package: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with this package instead of the installed one."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent), **variables},
    )


def test_report_says_what_was_built_and_what_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("TORCHFUSE_SOMETHING", "1")
    monkeypatch.setenv("SECRET_OF_SOMEBODY", "1")
    assert command_line.main(["--env"]) == 0
    report = read_report(capsys.readouterr().out)
    for key, value in _loader.recorded_build().items():
        assert report[f"built: {key}"] == (value or "none")
    for key in ("cuda", "cuda_architectures", "compiler", "cpu_levels"):
        assert f"built: {key}" in report
    assert report["torch"] == torch.__version__
    assert report["torch's cuda"] == (torch.version.cuda or "none")
    assert report["native library"] == "loads"
    assert report["loaded from"] == str(Path(torchfuse._C.__file__).parent)
    assert report["cpu level in use"] == torchfuse._C.cpu_isa()
    assert report["cpu threads"] == f"{torch.get_num_threads()} of {os.cpu_count()}"
    assert sum(key.startswith("gpu ") for key in report) == torch.cuda.device_count()
    assert {"python", "platform", "cpu", "nvidia driver", "package"} <= report.keys()
    assert report["OMP_NUM_THREADS"] == "2"
    assert report["TORCHFUSE_SOMETHING"] == "1"
    assert "SECRET_OF_SOMEBODY" not in report


def test_report_of_a_build_for_another_torch(broken_package: Path) -> None:
    result = run(broken_package, "-m", "torchfuse", "--env")
    assert result.returncode == 0, result.stderr
    report = read_report(result.stdout)
    assert report["built: torch"] == "2.99.0+cu199"
    assert report["torch"] == torch.__version__
    assert report["native library"].startswith(
        "ImportError: torchfuse: expected torch 2.99, with which it was built, got torch "
        f"{torch.__version__}."
    )
    assert report["package"] == str(broken_package)


def test_report_without_torch(broken_package: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    (broken_package.parent / "torch.py").write_text(missing, encoding="utf-8")
    result = run(broken_package, "-m", "torchfuse", "--env")
    assert result.returncode == 0, result.stderr
    report = read_report(result.stdout)
    assert report["torch"] == "ModuleNotFoundError: No module named 'torch'"
    assert "expected torch 2.99 or newer, got none" in report["native library"]
    assert report["built: torchfuse"] == torchfuse.__version__


@pytest.mark.parametrize("arguments", [("-c", "import torchfuse"), ("-m", "torchfuse.ops")])
def test_import_of_a_build_for_another_torch_names_what_helps(
    broken_package: Path, arguments: tuple[str, str]
) -> None:
    result = run(broken_package, *arguments)
    assert result.returncode != 0
    assert (
        "ImportError: torchfuse: expected torch 2.99, with which it was built, got torch "
        f"{torch.__version__}. Build torchfuse again in this environment, from its checkout or "
        "with its URL in place of the dot: "
        "pip install --no-cache-dir --force-reinstall --no-deps ."
    ) in result.stderr


def test_import_without_the_library_is_one_sentence(broken_package: Path) -> None:
    info = {**_loader.recorded_build(), "torch": torch.__version__}
    (broken_package / "build_info.json").write_text(json.dumps(info), encoding="utf-8")
    result = run(broken_package, "-c", "import torchfuse")
    assert result.returncode != 0
    assert (
        f"ImportError: torchfuse: expected its native library to load with torch "
        f"{torch.__version__}, got: No module named 'torchfuse._C'. Build torchfuse again"
    ) in result.stderr
