# SPDX-License-Identifier: BSD-3-Clause
"""Runs the stages of a call, each for its seconds, and keeps what they found in $OUT/result.json.

Exit status: 0 if every stage has passed and everything was as expected, 1 if not.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_run.stages import CALL_A, Part, Stage, call_b

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "build/gpu"
#: Seconds until the last stage of a call has ended: a machine is asked for 510, and for 120.
CALLS = {"a": 490.0, "b": 105.0}
#: A program that has used up its time is interrupted, so that pytest writes a report, then killed.
GRACE_SECONDS = 13.0  # xdist waits for its workers for ten
PRETENDED = os.environ.get("PRETENDED_CUDA") == "1"
#: What a device that computes on few cores is slower by.
SLOWNESS = 30.0 if PRETENDED else 1.0
NAMED_FAILURES, LOG_BYTES = 20, 2**21


#: What stages need beside torch and the bundle.
PROGRAMS = ("compute-sanitizer", "ncu")
MODULES = ("numpy", "pytest", "safetensors", "torchvision", "xdist")


def machine() -> dict[str, Any]:
    """The GPU, its driver, Python and torch; None for what is not there."""
    facts: dict[str, Any] = {"gpu": None, "driver": None, "capability": None, "torch": None}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        query = "--query-gpu=name,driver_version,compute_cap"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        answer = subprocess.check_output(command, text=True, timeout=20).splitlines()[0]
        facts |= zip(("gpu", "driver", "capability"), answer.split(", "), strict=True)
    if PRETENDED:
        facts |= {"gpu": "pretended", "capability": "9.0"}
    if torch := torch_folder():
        version = (torch / "version.py").read_text(encoding="utf-8")
        facts["torch"] = re.findall(r"__version__ = '(.*)'", version)[0]
    return facts | {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def torch_folder() -> Path | None:
    """Where torch lies, without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def commit() -> str:
    """The tree's commit, as TORCHFUSE_SHA or git says; nothing if neither does."""
    if named := os.environ.get("TORCHFUSE_SHA"):
        return named
    command = ["git", f"--git-dir={ROOT / '.git'}", "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return ""


def differences(facts: dict[str, Any], sha: str) -> Iterator[str]:
    """A sentence for each thing that is not what the bundle was built for."""
    remedy = "Run tools/gpu_bundle.sh on a machine with a compiler, and bring build/gpu."
    if facts["gpu"] is None:
        yield "expected a GPU that nvidia-smi names, got none."
    try:
        manifest = json.loads((BUNDLE / "manifest.json").read_text(encoding="utf-8"))
        sha_built, dirty, torch, python = (manifest[k] for k in ("sha", "dirty", "torch", "python"))
    except (OSError, ValueError, TypeError, KeyError):
        yield f"expected build/gpu/manifest.json, got none that can be read. {remedy}"
        return
    if (capability := float(facts["capability"] or 9.0)) != 9.0:
        outcome = "there is no code for it" if capability < 9.0 else "PTX is compiled for it"
        yield f"expected compute capability 9.0, got {capability}: {outcome}."
    programs = [] if PRETENDED else [n for n in PROGRAMS if not shutil.which(n)]
    absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if programs or absent:
        yield f"expected {', '.join(programs + absent)}, got none: what needs them fails."
    if not sha:
        yield "expected TORCHFUSE_SHA to name the commit where git does not, got nothing."
    elif not sha_built.startswith(sha):
        yield f"expected a bundle of {sha[:10]}, got one of {sha_built[:10]}. {remedy}"
    if dirty:
        yield "expected a bundle of a commit, got one of a tree with uncommitted changes."
    if facts["torch"] != torch:
        yield f"expected torch {torch}, got {facts['torch']}. {remedy}"
    if facts["python"].split(".")[:2] != python.split(".")[:2]:
        yield f"expected Python {python}, got {facts['python']}. {remedy}"


def environment(out: Path, work: Path) -> dict[str, str]:
    """The caller's, with the bundle's package, torch's libraries, and a GPU that is required."""
    # The pretended device's libraries, if it is there, come first.
    libraries = [os.environ.get("LD_LIBRARY_PATH"), BUNDLE / "site/torchfuse/lib"]
    if torch := torch_folder():
        libraries.append(torch / "lib")
    return {
        **os.environ,
        "PYTHONPATH": f"{BUNDLE / 'site'}:{os.environ.get('PYTHONPATH', '')}",
        "LD_LIBRARY_PATH": ":".join(str(folder) for folder in libraries if folder),
        "BUNDLE": str(BUNDLE),
        "OUT": str(out),
        "WORK": str(work),
        "FAILED_KERNEL_TESTS": "",
        # A test that hangs must not cost its whole stage.
        "TEST_TIMEOUT": "--timeout 60" if importlib.util.find_spec("pytest_timeout") else "",
        "TORCHFUSE_BUILD_DIR": "build/dev-cuda" if PRETENDED else "build/gpu",
        "TORCHFUSE_REQUIRE_CUDA": "1",
        # Threads that wait must not spin: on shared cores that costs a factor of four.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }


class Report:
    """What a part has left: counts of tests, names, reasons of skips, and figures."""

    def __init__(self, folder: Path) -> None:
        self.passed, self.error = 0, ""
        self.failures: list[str] = []
        self.skips = Counter[str]()
        self.figures: dict[str, Any] = {}
        for path in sorted(folder.glob("*.[xj]*")):
            try:
                if path.suffix == ".json":
                    self.figures |= json.loads(path.read_text(encoding="utf-8"))
                else:
                    self._add_tests(ElementTree.parse(path))
            except (OSError, ValueError, TypeError, KeyError, ElementTree.ParseError) as error:
                self.error = f"{path.name} cannot be read: {error}"

    def _add_tests(self, tree: ElementTree.ElementTree[Any]) -> None:
        """Those in a report of pytest or GoogleTest, with what they recorded."""
        for case in tree.iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failures.append(f"{case.get('classname')}.{case.get('name')}")
            elif skipped is not None:
                self.skips[" ".join((skipped.get("message") or "no reason").split())] += 1
            elif case.get("status") != "notrun":  # GoogleTest lists what a filter left out
                self.passed += 1
            self.figures |= {p.attrib["name"]: p.get("value") for p in case.iter("property")}

    def entry(self, status: int | None, seconds: float) -> dict[str, Any]:
        """A part has passed if its program says so, and a test ran or a figure is there."""
        reason = self.error
        if status is None:
            reason = "used up its time"
        elif status != 0:
            reason = f"exit status {status}"
        elif not reason and not self.passed and not self.figures:
            reason = "no test ran"
        return {
            "status": "failed" if reason else "passed",
            "reason": reason,
            "seconds": round(seconds, 1),
            "tests": {
                "passed": self.passed,
                "failed": len(self.failures),
                "failures": self.failures[:NAMED_FAILURES],
                "skipped": dict(self.skips),
            },
            "figures": self.figures,
        }


class Running:
    """A part that has been started, with the signals that end it and when they are due."""

    def __init__(self, part: Part, work: Path, variables: dict[str, str], limit: float) -> None:
        stem = re.sub(r"[^a-z0-9]+", "-", part.name.lower()).strip("-")
        self.folder = work / stem
        self.folder.mkdir()
        script = part.rehearsal if PRETENDED else part.script
        with (work / f"{stem}.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-euxc", script or ""],
                cwd=ROOT,
                env={**variables, **part.environment, "REPORT": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.signals = [(limit, signal.SIGINT), (limit + GRACE_SECONDS, signal.SIGKILL)]

    def has_ended(self, seconds: float) -> bool:
        """Whether it has, or could not be ended; sends what is due."""
        if self.process.poll() is not None:
            self.kill(signal.SIGKILL)  # what it has left behind
            return True
        if not self.signals:  # it hangs in a driver, and is left behind
            return True
        if seconds >= self.signals[0][0]:
            self.kill(self.signals.pop(0)[1])
            time.sleep(0.1)
        return False

    def kill(self, number: int) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def entry(self, seconds: float) -> dict[str, Any]:
        """Its outcome."""
        ended_itself = len(self.signals) == 2
        return Report(self.folder).entry(self.process.poll() if ended_itself else None, seconds)


class Call:
    """The stages of a call, and their outcome."""

    def __init__(self, name: str, out: Path) -> None:
        self.begin = time.monotonic()
        self.end = self.begin + CALLS[name] * SLOWNESS
        self.out, self.work = out, ROOT / "build/gpu-run.work"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.environment = environment(out, self.work)
        facts, sha = machine(), commit()
        self.problems = [*differences(facts, sha)]
        self.plan = CALL_A if name == "a" else call_b()
        parts = [part for stage in self.plan for part in stage]
        self.stages: dict[str, Any] = {
            part.name: {"status": "not run", "reason": "not reached"} for part in parts
        }
        self.suffix = "" if name == "a" else f"-{name}"
        self.result: dict[str, Any] = {
            "kind": "gpu_run",
            "call": name,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "sha": sha,
            "machine": facts,
            "problems": self.problems,
        }
        print(f"gpu_run {name}: {facts['gpu']}, torch {facts['torch']}", *self.problems, sep="\n  ")
        self.write()

    def write(self) -> bool:
        """Replaces the result as a whole; returns whether everything so far has passed."""
        outcomes = {entry["status"] for entry in self.stages.values()}
        passed = not self.problems and outcomes <= {"passed", "needs a GPU"}
        self.result |= {"seconds": round(time.monotonic() - self.begin, 1), "passed": passed}
        unfinished = self.out / "unfinished.json"
        text = json.dumps({**self.result, "stages": self.stages}, indent=1)
        unfinished.write_text(text + "\n", encoding="utf-8")
        os.replace(unfinished, self.out / f"result{self.suffix}.json")
        return passed

    def run(self, stage: Stage) -> None:
        """Runs the parts of a stage beside each other, those that there is time for."""
        begin = time.monotonic()
        left = self.end - begin - GRACE_SECONDS
        running: dict[str, Running] = {}
        try:
            for part in stage:
                if PRETENDED and part.rehearsal is None:
                    self.note(part.name, {"status": "needs a GPU"})
                elif left < part.seconds * SLOWNESS / 2:
                    reason = f"{max(left, 0):.0f} s were left, and it needs {part.seconds:.0f}"
                    self.note(part.name, {"status": "not run", "reason": reason})
                else:
                    limit = min(1.2 * part.seconds * SLOWNESS, left)
                    running[part.name] = Running(part, self.work, self.environment, limit)
            while running:
                seconds = time.monotonic() - begin
                for name in [name for name, one in running.items() if one.has_ended(seconds)]:
                    self.note(name, running.pop(name).entry(seconds))
                time.sleep(0.05)
        finally:
            for name, one in running.items():
                one.kill(signal.SIGKILL)
                self.note(name, {"status": "failed", "reason": "stopped with its call"})

    def note(self, name: str, entry: dict[str, Any]) -> None:
        """Keeps and prints the outcome of a part."""
        self.stages[name] = entry
        self.write()
        tests = entry.get("tests", {"passed": 0, "failed": 0, "failures": []})
        counts = (
            f"{tests['passed']} passed, {tests['failed']} failed" if any(tests.values()) else ""
        )
        notes = "; ".join(filter(None, (counts, entry.get("reason"))))
        print(f"{name:<38} {entry['status']:<11} {entry.get('seconds', 0):>6} s  {notes}".rstrip())
        print("".join(f"    {failure}\n" for failure in tests["failures"]), end="", flush=True)
        if name.startswith("kernels"):  # they run again, alone; pytest remembers its own
            self.environment["FAILED_KERNEL_TESTS"] = ":".join(tests["failures"])

    def archive(self) -> None:
        """The ends of all logs, which a second SIGTERM does not lose."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with tarfile.open(self.out / f"logs{self.suffix}.tar.xz", "w:xz", preset=1) as archive:
            for log in sorted(self.work.glob("*.log")):
                with log.open("rb") as file:
                    file.seek(-min(LOG_BYTES, log.stat().st_size), os.SEEK_END)
                    end = file.read()
                log.write_bytes(end)
                archive.add(log, log.name)


def main(arguments: list[str]) -> int:
    """Runs one call."""
    if len(arguments) != 1 or arguments[0] not in CALLS:
        print(f"gpu_run: expected a or b, got {' '.join(arguments) or 'nothing'}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["PATH"] += ":/usr/local/cuda/bin"
    out = Path(os.environ.get("OUT", ROOT / "build/gpu-run")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    call = Call(arguments[0], out)
    try:
        for stage in call.plan:
            try:
                call.run(stage)
            except Exception as error:  # whatever it is, the next stage must have its turn
                call.problems.append(f"{type(error).__name__}: {error}")
    finally:
        call.archive()
    passed = call.write()
    seconds = call.result["seconds"]
    print(f"gpu_run: {'passed' if passed else 'failed'} after {seconds} s; results in {out}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
