# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures and skip policy of all Python tests.

Environment:
    TORCHFUSE_REQUIRE_CUDA=1: a test that needs a GPU fails where there is none; it is not skipped.

Tests marked ``slow`` run with ``-m slow`` only (pyproject.toml). Those marked ``gpu_only`` are
skipped on the pretended device of tests/pretended_cuda, which cannot answer them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The helper package tests/python/support, whichever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent / "python"))

_ON_PRETENDED_CUDA = os.environ.get("PRETENDED_CUDA") == "1"
_NO_CUDA = "needs a CUDA device and a torchfuse built with CUDA"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--combinations",
        choices=("values", "pairs", "all"),
        default="values",
        help="of generated tests: so many that every value occurs, or every pair, or all",
    )
    parser.addoption(
        "--processes-of",
        help="files separated by blanks: tests that start processes run in these alone",
    )
    parser.addoption(
        "--orders-of-time",
        action="store_true",
        help="pretended CUDA: also try lazy orders with what calls a step or a collective",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--orders-of-time") and not _ON_PRETENDED_CUDA:
        raise pytest.UsageError(
            "--orders-of-time: expected the pretended CUDA device, got none. Run pytest by "
            "tools/on_pretended_cuda.sh"
        )


def _cuda_usable() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    from torchfuse import _loader

    return _loader.recorded_build()["cuda"] != ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu_only") and _ON_PRETENDED_CUDA:
        pytest.skip("gpu_only: the pretended device cannot answer it")
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


_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=_DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device the test runs on."""
    return str(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("--orders-of-time"):
        from support.orders_of_time import orders_of

        metafunc.parametrize(
            "_order_of_time", orders_of(metafunc), ids="order{}".format, indirect=True
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from support.combinations import deselect, keep_some

    keep_some(config, items)
    files: str | None = config.getoption("--processes-of")
    if files is not None:
        kept = {(config.rootpath / file).resolve() for file in files.split()}
        if missing := [file for file in kept if not file.exists()]:
            raise pytest.UsageError(f"--processes-of: expected files, got none at {missing}")
        of_processes = {item for item in items if item.get_closest_marker("processes")}
        deselect(config, items, {item for item in of_processes if item.path not in kept})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends a process whose CUDA context is lost: each test behind would fail with it."""
    result = yield
    torch = sys.modules.get("torch")
    if not _ON_PRETENDED_CUDA and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(70)  # xdist reports this test as failed, and starts another process
            pytest.exit(f"the CUDA context is lost: {error}", 70)
    return result


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays() -> None:
    """A test that collects garbage does not walk through all that the files before it have made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _order_of_time(request: pytest.FixtureRequest) -> Iterator[int]:
    """What waits on a CUDA device is done at once, or in the order of this seed."""
    if not hasattr(request, "param"):
        yield 0
        return
    from support.orders_of_time import set_order

    set_order(request.param)
    yield request.param
    set_order(0)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Dynamo compiles a function only so many times in a process, whoever asks for it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture(autouse=True)
def _device_of_its_own(request: pytest.FixtureRequest, _order_of_time: int) -> Iterator[None]:
    """On the pretended device no test depends on those before it."""
    if not _ON_PRETENDED_CUDA:
        yield
        return
    from support.orders_of_time import end_of_test, set_order_of_test

    if _order_of_time:
        set_order_of_test(request.node.nodeid)
    yield
    end_of_test()


@pytest.fixture(scope="module", params=_DEVICES)
def group_device(request: pytest.FixtureRequest, _order_of_time: int) -> str:
    """Each device that the processes of a module's group run on."""
    return str(request.param)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, on the CPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


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
