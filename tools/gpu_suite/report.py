# SPDX-License-Identifier: BSD-3-Clause
"""The result file, the table at the end, and the logs in one archive."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_suite import prerequisites
from gpu_suite.model import FAILED, NOT_RUN, PASSED, slug
from gpu_suite.runner import Result
from gpu_suite.stages import BENCHMARK, BENCHMARK_RESULT, Setup, left_out

KIND = "gpu_suite"
FORMAT = 1
UNKNOWN_SHA = "unknown"
TAIL_LINES, TAIL_CHARACTERS = 60, 8000
NOT_REACHED, NOT_SELECTED = "not reached", "not selected"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def commit(root: Path, named: str | None) -> tuple[str, bool | None]:
    """The commit and whether files differ from it; None where nobody can tell.

    Raises:
        ValueError: `named` is not a commit's name.
    """
    if named:
        if not re.fullmatch(r"[0-9a-f]{7,40}", named):
            raise ValueError(f"expected --sha or TORCHFUSE_SHA to be 7 to 40 hex digits: {named!r}")
        return named, None
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return UNKNOWN_SHA, None
    status = _git(root, "status", "--porcelain")
    return _git(root, "rev-parse", "HEAD") or UNKNOWN_SHA, None if status is None else bool(status)


def new_result(
    setup: Setup, sha: str, dirty: bool | None, names: Sequence[str], chosen: Sequence[str]
) -> dict[str, Any]:
    """The result before the first stage; whatever ends the program, each stage is in the file."""
    facts, nvcc = setup.machine.facts, setup.machine.tools["nvcc"]
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "kind": KIND,
        "format": FORMAT,
        "date": now.isoformat(timespec="seconds"),
        "sha": sha,
        "dirty": dirty,
        "with_cuda": setup.with_cuda,
        "gpu": facts["gpu"] if setup.on_gpu else None,
        "driver": facts.get("driver"),
        "torch": facts["torch"],
        "cuda": facts["cuda"],
        "nvcc": prerequisites.nvcc_release(nvcc) if nvcc is not None else None,
        "python": facts["python"],
        "cpu": facts["cpu"],
        "cores": setup.machine.cores,
        "seconds": 0.0,
        "passed": False,
        "stages": [
            _entry(name, NOT_RUN, NOT_REACHED if name in chosen else NOT_SELECTED) for name in names
        ],
        "left_out": left_out(setup),
        "benchmark": None,
    }


def _entry(name: str, status: str, reason: str = "", **more: Any) -> dict[str, Any]:
    defaults = {"required": True, "seconds": 0.0, "key": "", "counts": {}, "figures": {}}
    return {"name": name, "status": status, "reason": reason, **defaults, "log_tail": "", **more}


def tail(log: str, root: Path) -> str:
    """The log's end, without the checkout's place on this machine."""
    end = "\n".join(log.splitlines()[-TAIL_LINES:])
    return end.replace(f"{root}/", "").replace(str(root), ".")[-TAIL_CHARACTERS:]


def record(result: dict[str, Any], outcome: Result, root: Path, seconds: float) -> dict[str, Any]:
    """Puts one stage into the result; returns its entry."""
    verdict = outcome.verdict
    entry = _entry(
        outcome.name,
        verdict.status,
        verdict.reason,
        required=verdict.required,
        seconds=round(outcome.seconds, 2),
        key=verdict.key,
        counts=dict(verdict.counts),
        figures=dict(verdict.figures),
        log_tail=tail(outcome.log, root) if verdict.status == FAILED else "",
    )
    stages = result["stages"]
    index = next(i for i, stage in enumerate(stages) if stage["name"] == outcome.name)
    stages[index] = entry
    result["seconds"] = round(seconds, 1)
    result["passed"] = all(
        stage["status"] == PASSED or (stage["status"] == NOT_RUN and not stage["required"])
        for stage in stages
    )
    if outcome.name == BENCHMARK and verdict.status == PASSED:
        result["benchmark"] = json.loads((root / BENCHMARK_RESULT).read_text(encoding="utf-8"))
    return entry


def default_path(result: Mapping[str, Any], work: Path, results: Path, partial: bool) -> Path:
    """Among the committed results for a whole run on a GPU, else in the build folder."""
    if result["gpu"] is None:
        return work / ("pretended.json" if result["with_cuda"] else "without-cuda.json")
    if partial:
        return work / "partial.json"
    name = f"{result['date'][:10]}-{result['sha'][:7]}.json"
    return results / slug(result["gpu"]["name"]) / name


def write(result: Mapping[str, Any], path: Path) -> None:
    """Replaces the file as a whole: a program that is killed leaves no half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def table(result: Mapping[str, Any]) -> str:
    """Stage, status, seconds, and the key figure or the reason."""
    rows = [("stage", "status", "seconds", "")]
    for stage in result["stages"]:
        notes = [note for note in (stage["reason"], stage["key"]) if note]
        seconds = f"{stage['seconds']:.1f}"
        rows.append((stage["name"], stage["status"], seconds, "; ".join(notes)))
    names, states = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{a:<{names}}  {b:<{states}}  {c:>7}  {d}".rstrip() for a, b, c, d in rows]
    gpu = result["gpu"]["name"] if result["gpu"] else "no GPU (--without-cuda)"
    verdict = "passed" if result["passed"] else "FAILED"
    head = f"gpu_suite: {gpu}, torch {result['torch']}, commit {result['sha'][:7]}"
    lines += [f"left out: {text}" for text in result["left_out"]]
    return "\n".join([head, *lines, f"gpu_suite: {verdict} in {result['seconds']:.0f} s"])


def export(folder: Path, result_file: Path, logs: Path, summary: str) -> None:
    """Three files for whoever fetches them from the machine: result, summary, archive of logs."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(result_file, folder / "result.json")
    (folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    with tarfile.open(folder / "logs.tar.gz", "w:gz") as archive:
        archive.add(logs, arcname="logs")
