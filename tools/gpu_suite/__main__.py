# SPDX-License-Identifier: BSD-3-Clause
"""Command line of tools/gpu_suite.sh.

Exit status: 0 if every stage passed (with --without-cuda: every stage that can run without a GPU),
1 if one did not, 2 if something is missing before the first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from gpu_suite import prerequisites, report
from gpu_suite.model import FAILED, Stage
from gpu_suite.runner import Result, Runner
from gpu_suite.stages import LOGS, OUTPUTS, ROOT, WORK, Setup, all_stages, build_stages

BUDGET = 570.0
BUDGET_WITHOUT_CUDA = 3600.0
SHOWN_LINES = 25


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line; environment variables are the defaults."""
    env = os.environ
    parser = argparse.ArgumentParser(
        prog="tools/gpu_suite.sh",
        description="Builds torchfuse for this GPU, runs every check on it, writes a result file.",
        epilog="Exit status: 0 all passed, 1 a stage did not, 2 something is missing.",
    )
    parser.add_argument(
        "--without-cuda",
        action="store_true",
        default=env.get("TORCHFUSE_GPU_SUITE_WITHOUT_CUDA", "0") not in ("", "0"),
        help="run what a machine without a GPU can, show the rest",
    )
    parser.add_argument("--budget", type=float, help=f"seconds in all; default {BUDGET:.0f}")
    parser.add_argument("--only", help="run the stages whose name contains this, and the build")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/GPU/DATE-SHA.json")
    parser.add_argument("--logs", type=Path, help="also leave result, summary and logs here")
    parser.add_argument("--sha", default=env.get("TORCHFUSE_SHA"), help="commit; default: git's")
    source = env.get("TORCHFUSE_GTEST_SOURCE")
    parser.add_argument(
        "--gtest-source",
        type=Path,
        default=Path(source) if source else None,
        help="source folder of GoogleTest; default $TORCHFUSE_GTEST_SOURCE",
    )
    options = parser.parse_args(arguments)
    if options.gtest_source is not None:
        options.gtest_source = options.gtest_source.resolve()
    return options


def child_environment(setup: Setup) -> dict[str, str]:
    """The caller's environment with our package, and with the GPU required or hidden."""
    environment = dict(os.environ)
    paths = [str(ROOT / setup.site), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # Behind the caller's own, so that nothing is hidden: what was found elsewhere, and its kin.
    folders = [str(Path(tool).parent) for tool in setup.machine.tools.values() if tool]
    environment["PATH"] = os.pathsep.join([environment.get("PATH", ""), *dict.fromkeys(folders)])
    environment["PYTHONUNBUFFERED"] = "1"
    if setup.with_cuda:
        environment["TORCHFUSE_REQUIRE_CUDA"] = "1"
    else:
        environment.pop("TORCHFUSE_REQUIRE_CUDA", None)
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _say(text: str) -> None:
    print(text, flush=True)


def selected(setup: Setup, only: str | None) -> list[Stage]:
    """All stages, or the build and those with `only` in their names."""
    always = {stage.name for stage in build_stages(setup)}
    stages = all_stages(setup)
    return [s for s in stages if not only or s.name in always or only in s.name]


def run_suite(
    options: argparse.Namespace, setup: Setup, result: dict[str, Any], out: Path, started: float
) -> None:
    """Runs the selected stages and keeps the files up to date."""
    stages = selected(setup, options.only)

    def finished(outcome: Result) -> None:
        elapsed = time.monotonic() - started
        entry = report.record(result, outcome, ROOT, elapsed)
        note = "; ".join(text for text in (entry["reason"], entry["key"]) if text)
        took = f", {entry['seconds']:.1f} s" if entry["seconds"] else ""
        _say(f"[{elapsed:5.0f} s] {entry['name']}: {entry['status']}{took}  {note}".rstrip())
        if entry["status"] == FAILED:
            _say("\n".join(f"    {line}" for line in entry["log_tail"].splitlines()[-SHOWN_LINES:]))
        report.write(result, out)
        if options.logs is not None:
            report.export(options.logs, out, ROOT / LOGS, report.table(result))

    for stage in stages:
        for command in stage.announced:
            _say(f"would run on a GPU: {command}")
    runner = Runner(ROOT, ROOT / LOGS, child_environment(setup), options.budget, started)
    runner.run_all(stages, finished)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Runs the suite."""
    started = time.monotonic()
    options = parse_arguments(arguments)
    machine = prerequisites.inspect(os.environ, options.gtest_source)
    missing = prerequisites.missing(machine, with_cuda=not options.without_cuda)
    try:
        sha, dirty = report.commit(ROOT, options.sha)
    except ValueError as error:
        missing.append(str(error))
    if missing:
        print("gpu_suite: not started, because this is missing:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in missing), file=sys.stderr)
        return 2

    setup = Setup(machine, with_cuda=not options.without_cuda)
    if options.budget is None:
        options.budget = BUDGET if setup.on_gpu else BUDGET_WITHOUT_CUDA
    names = [stage.name for stage in all_stages(setup)]
    chosen = [stage.name for stage in selected(setup, options.only)]
    if options.only and not any(options.only in name for name in names):
        print(f"gpu_suite: no stage has {options.only!r} in its name: {names}", file=sys.stderr)
        return 2
    result = report.new_result(setup, sha, dirty, names, chosen)
    partial = bool(options.only)
    results = ROOT / "benchmarks/results"
    out = options.out or report.default_path(result, ROOT / WORK, results, partial)
    for folder in (LOGS, OUTPUTS):
        shutil.rmtree(ROOT / folder, ignore_errors=True)
        (ROOT / folder).mkdir(parents=True)
    report.write(result, out)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run_suite(options, setup, result, out, started)
    except KeyboardInterrupt:
        _say("gpu_suite: interrupted; the result file holds what was finished")
    _say("\n" + report.table(result))
    _say(f"result file: {out}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
