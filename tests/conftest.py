# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures and skip policy of all Python tests.

Environment:
    TORCHFUSE_REQUIRE_CUDA=1: a test that needs a GPU fails where there is none; it is not skipped.

Tests marked ``slow`` run with ``-m slow`` only (pyproject.toml).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The helper package tests/python/support, whichever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent / "python"))

_NO_CUDA = "needs a CUDA device and a torchfuse built with CUDA"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    config.addinivalue_line("markers", "slow: takes minutes or much memory; run with -m slow")


def _cuda_usable() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    import torchfuse

    return torchfuse._C.build_info()["cuda"] != ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or _cuda_usable():
        return
    if os.environ.get("TORCHFUSE_REQUIRE_CUDA") == "1":
        pytest.fail(f"TORCHFUSE_REQUIRE_CUDA=1, but this test {_NO_CUDA}", pytrace=False)
    pytest.skip(_NO_CUDA)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(_NO_CUDA in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(f"{count} tests skipped: each {_NO_CUDA}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device the test runs on."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _isolated_process_state() -> Iterator[None]:
    """Seeds torch, and restores thread count, default dtype and CPU instruction level."""
    import torch

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    native = getattr(sys.modules.get("torchfuse"), "_C", None)
    isa = native.cpu_isa() if native is not None else None
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    if native is not None:
        native.set_cpu_isa(isa)
