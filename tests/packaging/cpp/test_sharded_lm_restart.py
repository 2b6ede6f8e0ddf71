# SPDX-License-Identifier: BSD-3-Clause
"""The language model in C++ under torchrun's restarts: the bits of a run without interruption."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cmake_project import environment, run

TEXT = sysconfig.get_path("stdlib")
STEPS = 9
SMALL = ("--layers", "2", "--width", "32", "--heads", "4", "--sequence", "32", "--batch", "8")
SMALL = (*SMALL, "--steps", str(STEPS), "--warm-up", "4", "--validation-samples", "16")
SMALL = (*SMALL, "--checkpoint-every", "3")
LOGGED = ("step", "loss", "lr", "grad_norm", "validation_loss")

#: A library before the C library's: the process dies instead of replacing its n-th checkpoint. The
#: first two attempts have a death.
DYING = """
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

extern "C" int rename(const char* from, const char* to) noexcept {
  static int replaced = 0;
  const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const bool replaces = std::string_view(to).ends_with("/checkpoint.pt");
  if (replaces && attempt != nullptr && ++replaced == std::atoi(attempt) + 1 && *attempt < '2') {
    kill(getpid(), SIGKILL);
  }
  return renameat(AT_FDCWD, from, AT_FDCWD, to);
}
"""


@pytest.fixture(scope="module")
def program(example: Callable[[str], Path]) -> Path:
    return example("sharded_lm")


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dying")
    (folder / "dying.cpp").write_text(DYING, encoding="utf-8")
    options = ("-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    run("g++", *options, folder / "dying.cpp", "-o", folder / "libdying.so")
    return folder / "libdying.so"


def torchrun(out: Path, *command: str | Path, restarts: int = 0, **variables: str) -> str:
    """What two processes print."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
    processes = ("--nproc-per-node", "2", "--max-restarts", str(restarts))
    return run(
        *("timeout", "240", *launcher, *processes, *command, TEXT, "--out", out, *SMALL),
        "--resume-or-begin",
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **variables),
    )


def log(out: Path) -> list[dict[str, Any]]:
    """What does not depend on the clock, in each record of the log."""
    records = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: record[name] for name in LOGGED if name in record} for record in records]


def test_restarts_lead_to_the_bits_of_an_uninterrupted_run(
    program: Path, dying: Path, tmp_path: Path
) -> None:
    torchrun(tmp_path / "whole", program)
    # Rank 0 alone replaces the checkpoint.
    command = f'LD_PRELOAD={dying} exec "$@"'
    printed = torchrun(tmp_path / "restarted", "bash", "-c", command, "bash", program, restarts=2)
    assert printed.count("(exitcode: -9)") == 2, printed
    expected = log(tmp_path / "whole")
    assert [record["step"] for record in expected if "loss" in record] == [*range(1, STEPS + 1)]
    assert log(tmp_path / "restarted") == expected

    before = log(tmp_path / "restarted")
    assert f"has all {STEPS} steps already" in torchrun(tmp_path / "restarted", program)
    assert log(tmp_path / "restarted") == before
