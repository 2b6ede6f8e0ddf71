# SPDX-License-Identifier: BSD-3-Clause
"""Writes $OUT/result.json from what the parts of tools/gpu_run.sh left in $WORK, and prints it.

    gpu_result.py SECONDS PART...

Exit status: 0 if every part has passed and everything was as expected, 1 if not.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

OUT, WORK, BUNDLE = (Path(os.environ[name]) for name in ("OUT", "WORK", "BUNDLE"))
PRETENDED = os.environ.get("PRETENDED_CUDA") == "1"
#: What parts need beside torch and the bundle.
PROGRAMS = () if PRETENDED else ("compute-sanitizer", "ncu")
MODULES = ("numpy", "pytest", "safetensors", "torchvision", "xdist")


def output(*command: str) -> str:
    """What a program prints, or nothing if it fails."""
    try:
        return subprocess.check_output(
            command, text=True, timeout=20, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def machine() -> dict[str, Any]:
    """The GPU, its driver, Python and torch; None for what is not there."""
    query = "--query-gpu=name,driver_version,compute_cap"
    answer = output("nvidia-smi", query, "--format=csv,noheader").partition("\n")[0].split(", ")
    if PRETENDED:
        answer = ["pretended", "none", "9.0"]
    gpu, driver, capability = answer if len(answer) == 3 else (None, None, None)
    version = Path(os.environ["TORCH"], "version.py").read_text(encoding="utf-8")
    return {
        "gpu": gpu,
        "driver": driver,
        "capability": capability,
        "torch": re.findall(r"__version__ = '(.*)'", version)[0],
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }


def problems(facts: dict[str, Any], sha: str) -> Iterator[str]:
    """A sentence for each thing that is not what the bundle was built for."""
    manifest = json.loads((BUNDLE / "manifest.json").read_text(encoding="utf-8"))
    if facts["capability"] != "9.0":
        yield f"expected a GPU of compute capability 9.0, got {facts['capability']}."
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    absent += [name for name in MODULES if importlib.util.find_spec(name) is None]
    if absent:
        yield f"expected {', '.join(absent)}, got none: the parts that need them fail."
    if not sha or not manifest["sha"].startswith(sha):
        yield f"expected a bundle of commit '{sha}' (TORCHFUSE_SHA), got {manifest['sha']}."
    if manifest["dirty"]:
        yield "expected a bundle of a commit, got one of a tree with uncommitted changes."
    for name, digits in (("torch", None), ("python", 4)):
        if facts[name][:digits] != manifest[name][:digits]:
            yield f"expected {name} {manifest[name]}, got {facts[name]}."


def part(name: str) -> dict[str, Any]:
    """A part has passed if its program says so, and a test ran or a figure is there."""
    folder = WORK / name
    if not (folder / "status").exists():
        return {"status": "not run", "reason": "not reached"}
    words = (folder / "status").read_text(encoding="utf-8").strip()
    if not words[0].isdigit():
        status, _, reason = words.partition(": ")
        return {"status": status, "reason": reason}
    code, seconds = map(int, words.split())
    reason = f"exit status {code}" if code else ""
    passed, failures, skips = 0, list[str](), Counter[str]()
    figures: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".json":
                figures |= json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".xml":
                for case in ElementTree.parse(path).iter("testcase"):
                    skipped = case.find("skipped")
                    if case.find("failure") is not None or case.find("error") is not None:
                        failures.append(f"{case.get('classname')}.{case.get('name')}")
                    elif skipped is not None:
                        skips[" ".join((skipped.get("message") or "no reason").split())] += 1
                    elif case.get("status") != "notrun":  # GoogleTest lists what a filter left out
                        passed += 1
                    figures |= {p.attrib["name"]: p.get("value") for p in case.iter("property")}
            elif path.suffix == ".log" and not path.with_suffix(".xml").exists():
                # A process that died without a report: in the test that it began last.
                failures += re.findall(r"^\[ RUN +\] (\S+)", path.read_text(), re.MULTILINE)[-1:]
        except (OSError, ValueError, TypeError, KeyError, ElementTree.ParseError) as error:
            reason = f"{path.name} cannot be read: {error}"
    if code in (124, 137):
        reason = "used up its time"
    elif not reason and not passed and not figures:
        reason = "no test ran"
    return {
        "status": "failed" if reason else "passed",
        "reason": reason,
        "seconds": seconds,
        "tests": {
            "passed": passed,
            "failed": len(failures),
            "failures": failures[:20],
            "skipped": dict(skips),
        },
        "figures": figures,
    }


def main(seconds: str, *names: str) -> int:
    """Writes the result; prints a line for each part."""
    facts = machine()
    sha = os.environ.get("TORCHFUSE_SHA") or output("git", "rev-parse", "HEAD")
    stages = {name: part(name) for name in names}
    found = [*problems(facts, sha)]
    passed = not found and {s["status"] for s in stages.values()} <= {"passed", "needs a GPU"}
    result = {
        "kind": "gpu_run",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "sha": sha,
        "machine": facts,
        "problems": found,
        "seconds": int(seconds),
        "passed": passed,
        "stages": stages,
    }
    unfinished = OUT / "unfinished.json"
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, OUT / "result.json")
    kernels = [stages.get(name, {}).get("tests", {}) for name in ("load", "kernels", "hand_overs")]
    failed = [f for tests in kernels for f in tests.get("failures", []) if f.startswith("Cuda")]
    (WORK / "failed_kernel_tests").write_text(":".join(failed), encoding="utf-8")
    print(f"gpu_run: {facts['gpu']}, torch {facts['torch']}", *found, sep="\n  ")
    for name, entry in stages.items():
        tests = entry.get("tests", {"passed": 0, "failed": 0, "failures": []})
        counts = f"{tests['passed']} passed, {tests['failed']} failed"
        line = f"{name:<13} {entry['status']:<11} {entry.get('seconds', 0):>4} s  {counts}"
        print(line, entry.get("reason", ""), *tests["failures"], sep="  ")
    print(f"gpu_run: {'passed' if passed else 'failed'} after {seconds} s; results in {OUT}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
