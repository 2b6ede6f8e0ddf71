# SPDX-License-Identifier: BSD-3-Clause
"""Builds torchfuse for this GPU and proves a part of it there.

Exit status: 0 if every stage of the call has passed, 1 if one has not, 2 if something is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_suite import judges, machine
from gpu_suite.result import (
    FAILED,
    NOT_RUN,
    PASSED,
    Commit,
    ResultFile,
    commit,
    not_run,
    slug,
    tail,
)
from gpu_suite.stages import CALLS, ROOT, Stage

# Less than this much time left is not enough to start anything.
LEAST_SECONDS = 5.0
GRACE_SECONDS = 5.0
# What a device that computes on few cores is slower by.
PRETENDED_SLOWNESS = 20.0


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it started; one that hangs in a driver is left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def run(stage: Stage, work: Path, environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Runs one stage for so long at most; its entry in the result."""
    begin = time.monotonic()
    log, report = (work / f"{slug(stage.name)}.{kind}" for kind in ("log", "report"))
    report.unlink(missing_ok=True)  # one of an earlier run must not count
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euxc", stage.script],
            cwd=ROOT,
            env={**environment, **stage.environment, "REPORT": str(report)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            if process.poll() is None:
                stop(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    try:
        verdict = judges.Verdict(f"stopped after {seconds:.0f} s")
        if status is not None:
            verdict = stage.judge(judges.Finished(status, text, report))
    except Exception as error:  # whatever it is, the next stage must have its turn
        verdict = judges.Verdict(f"could not be judged: {error!r}")
    return {
        "status": FAILED if verdict.reason else PASSED,
        "reason": verdict.reason,
        "seconds": round(time.monotonic() - begin, 1),
        "key": verdict.key,
        "figures": dict(verdict.figures),
        "log_tail": tail(text, ROOT) if verdict.reason else "",
    }


def run_call(
    call: str, stages: list[Stage], result: ResultFile, environment: dict[str, str], end: float
) -> None:
    """Runs what has not passed, each stage's outcome in the file before the next begins."""
    work = ROOT / "build/gpu_suite" / call
    work.mkdir(parents=True, exist_ok=True)
    entries = result.begin(call, [stage.name for stage in stages])
    if result.passed(call):
        print(f"gpu_suite: everything in {call} has passed before")
        return
    build = stages[0]
    for stage in stages:
        # The build always anew: the machine may be another one.
        if stage is not build and entries[stage.name]["status"] == PASSED:
            continue
        left = end - time.monotonic() - LEAST_SECONDS
        if stage is not build and entries[build.name]["status"] != PASSED:
            entry = not_run("the build failed")
        elif left < LEAST_SECONDS:
            entry = not_run("no time left; repeat the call")
        else:
            entry = run(stage, work, environment, min(60 * stage.minutes, left))
        entries[stage.name] = entry
        result.write()
        notes = "; ".join(filter(None, (entry["reason"], entry.get("key"))))
        print(f"{stage.name:<32} {entry['status']:<8} {entry['seconds']:>7.1f} s  {notes}".rstrip())
        print(textwrap.indent(entry.get("log_tail", ""), "    "), end="", flush=True)


def rehearse(stages: Iterable[Stage]) -> Iterator[Stage]:
    """What the pretended device can show of the stages; the other ones are named and left out."""
    for stage in stages:
        if stage.rehearsal is None:
            print(f"{stage.name:<32} {NOT_RUN:<8} needs a GPU")
            continue
        yield dataclasses.replace(
            stage,
            minutes=PRETENDED_SLOWNESS * stage.minutes,
            script=stage.rehearsal,
            judge=stage.judge if "$REPORT" in stage.rehearsal else judges.judge_status,
            environment={},
        )


def child_environment(facts: Mapping[str, Any], path: str) -> dict[str, str]:
    """The caller's environment with our package, the tools, and a GPU that is required."""
    environment = {**os.environ, "PATH": path, "TORCHFUSE_REQUIRE_CUDA": "1"}
    # Threads that wait must not spin: on shared cores that costs a factor of four.
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    if facts["pretended"]:
        return {"TORCHFUSE_BUILD_DIR": "build/dev", **environment}
    if source := environment.get("TORCHFUSE_GTEST_SOURCE"):
        environment["TORCHFUSE_GTEST_SOURCE"] = str(Path(source).resolve())
    environment["PYTHONPATH"] = f"{ROOT / 'build/gpu/site'}:{environment.get('PYTHONPATH', '')}"
    return {**environment, "TORCHFUSE_BUILD_DIR": "build/gpu"}


def main(arguments: list[str]) -> int:
    """Runs one call of the suite."""
    started = time.monotonic()
    parser = argparse.ArgumentParser("tools/gpu_suite.sh", description=__doc__)
    parser.add_argument("call", choices=CALLS)
    name: str = parser.parse_args(arguments).call
    facts = machine.probe()
    path = machine.search_path(facts["torch_root"])
    call = CALLS[name](facts)
    lines = machine.missing(facts, () if facts["pretended"] else call.tools, path)
    at: Commit = ("", None)
    try:
        at = commit(ROOT, os.environ.get("TORCHFUSE_SHA"))
    except ValueError as error:
        lines.append(str(error))
    if lines:
        print("gpu_suite: not started, because this is missing:", file=sys.stderr)
        print("\n".join(f"  {text}" for text in lines), file=sys.stderr)
        return 2

    stages, minutes = list(call.stages), call.minutes
    folder = ROOT / "benchmarks/results"
    if facts["pretended"]:
        stages, minutes = list(rehearse(stages)), PRETENDED_SLOWNESS * minutes
        folder = ROOT / "build/gpu_suite/rehearsal"
        shutil.rmtree(folder, ignore_errors=True)
    result = ResultFile(folder, facts, at, CALLS)
    print(f"gpu_suite {name}: {facts['gpu']}, torch {facts['torch']}, commit {at[0][:7]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run_call(name, stages, result, child_environment(facts, path), started + 60 * minutes)
    passed = result.passed(name)
    what = "rehearsal of " if facts["pretended"] else ""
    print(f"gpu_suite: {what}{name} {PASSED if passed else FAILED}; {result.path}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
