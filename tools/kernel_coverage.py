# SPDX-License-Identifier: BSD-3-Clause
"""Which lines of the CUDA kernels the tests on the CPU execute.

Reads what the tests of the preset ``coverage`` left in its build folder, with gcovr. Fails if less
than the wanted share of ``csrc/kernels/cuda`` was executed, or if a line that was not has no reason
in ``tests/cpp/cuda_on_cpu/uncovered.json``.

Example:
    cmake --preset coverage && cmake --build --preset coverage && ctest --preset coverage
    python tools/kernel_coverage.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/coverage"
KERNELS = "csrc/kernels/cuda/"
REASONS = ROOT / "tests/cpp/cuda_on_cpu/uncovered.json"
WANTED_PERCENT = 95.0


def executions(report: Mapping[str, Any]) -> Counter[tuple[str, int]]:
    """How often each line of code ran, by file and number, from gcovr's JSON.

    The lines of templates and inlined functions, which are there several times, are added up.
    """
    counts = Counter[tuple[str, int]]()
    for file in report["files"]:
        for line in file["lines"]:
            if not line.get("gcovr/noncode", False):
                counts[file["file"], line["line_number"]] += line["count"]
    return counts


def run_gcovr() -> dict[str, Any]:
    """The report of gcovr over the kernels, or SystemExit with a sentence."""
    if not any(BUILD.rglob("*.gcda")):
        raise SystemExit(
            f"kernel_coverage: no counts in {BUILD}; build and run the preset coverage first"
        )
    command = ["gcovr", "--root", str(ROOT), "--filter", KERNELS, "--json", "-"]
    command += ["--merge-mode-functions=merge-use-line-min", str(BUILD)]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise SystemExit("kernel_coverage: gcovr is missing; pip install gcovr==8.8") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"kernel_coverage: gcovr failed:\n{error.stderr}") from None
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def main() -> int:
    """Prints the lines that were not executed, and why, and the share of the others."""
    counts = executions(run_gcovr())
    if not counts:
        raise SystemExit(f"kernel_coverage: the report names no file under {KERNELS}")
    entries = json.loads(REASONS.read_text())
    reasons = {(entry["file"], entry["text"]): entry["reason"] for entry in entries}
    sources = {file: (ROOT / file).read_text().splitlines() for file, _ in counts}
    uncovered = [(file, number) for (file, number), count in sorted(counts.items()) if count == 0]
    found, failed = set(), False
    for file, number in uncovered:
        text = sources[file][number - 1].strip()
        found.add((file, text))
        if (file, text) in reasons:
            print(f"{file}:{number}: {text}\n    {reasons[file, text]}")
        else:
            failed = True
            print(f"{file}:{number}: never executed: {text}")
    for file, text in sorted(reasons.keys() - found):
        failed = True
        print(f"{REASONS.name}: {file}: executed, or gone: {text}")
    share = 100 * (1 - len(uncovered) / len(counts))
    print(
        f"kernel_coverage: {share:.1f} % of {len(counts)} lines in {len(sources)} files of "
        f"{KERNELS} executed, {len(uncovered)} not"
    )
    return 1 if failed or share < WANTED_PERCENT else 0


if __name__ == "__main__":
    sys.exit(main())
