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

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "csrc/kernels/cuda/"
REASONS = ROOT / "tests/cpp/cuda_on_cpu/uncovered.json"


@dataclass(frozen=True)
class Line:
    """One line with code on it."""

    file: str
    number: int
    count: int


def lines_of(report: Mapping[str, Any]) -> list[Line]:
    """The lines of a gcovr JSON report, those of templates and inlined functions merged."""
    counts: dict[tuple[str, int], int] = {}
    for file in report["files"]:
        for line in file["lines"]:
            if line.get("gcovr/noncode", False):
                continue
            key = (file["file"], line["line_number"])
            counts[key] = counts.get(key, 0) + line["count"]
    return [Line(file, number, count) for (file, number), count in sorted(counts.items())]


def run_gcovr(build_dir: Path) -> dict[str, Any]:
    """The report of gcovr over the kernels, or SystemExit with a sentence."""
    if not any(build_dir.rglob("*.gcda")):
        raise SystemExit(
            f"kernel_coverage: no counts in {build_dir}; build and run the preset coverage first"
        )
    command = ["gcovr", "--root", str(ROOT), "--filter", KERNELS, "--json", "-"]
    command += ["--merge-mode-functions=merge-use-line-min", str(build_dir)]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise SystemExit("kernel_coverage: gcovr is missing; pip install gcovr==8.8") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"kernel_coverage: gcovr failed:\n{error.stderr}") from None
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def read_reasons(path: Path) -> dict[tuple[str, str], str]:
    """Why a line stays without execution, by file and text."""
    entries = json.loads(path.read_text())
    return {(entry["file"], entry["text"]): entry["reason"] for entry in entries}


def unexplained(
    uncovered: Iterable[Line],
    reasons: Mapping[tuple[str, str], str],
    text_of: Mapping[tuple[str, int], str],
) -> list[str]:
    """Complaints about lines without a reason and reasons without a line."""
    left = dict(reasons)
    complaints = []
    for line in uncovered:
        text = text_of[line.file, line.number]
        reason = left.pop((line.file, text), reasons.get((line.file, text)))
        if reason is None:
            complaints.append(f"{line.file}:{line.number}: never executed: {text}")
        else:
            print(f"{line.file}:{line.number}: {text}\n    {reason}")
    complaints += [
        f"{REASONS.name}: {file}: executed, or gone: {text}" for file, text in sorted(left)
    ]
    return complaints


def main() -> int:
    """Prints the share, the lines that were not executed, and why."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build/coverage")
    parser.add_argument("--fail-under", type=float, default=95.0, help="percent; default 95")
    arguments = parser.parse_args()

    lines = lines_of(run_gcovr(arguments.build_dir))
    if not lines:
        raise SystemExit(f"kernel_coverage: the report names no file under {KERNELS}")
    uncovered = [line for line in lines if line.count == 0]
    sources = {file: (ROOT / file).read_text().splitlines() for file in {x.file for x in lines}}
    text_of = {(x.file, x.number): sources[x.file][x.number - 1].strip() for x in lines}
    complaints = unexplained(uncovered, read_reasons(REASONS), text_of)
    for complaint in complaints:
        print(complaint)
    share = 100 * (1 - len(uncovered) / len(lines))
    files = len({line.file for line in lines})
    print(
        f"kernel_coverage: {share:.1f} % of {len(lines)} lines in {files} files of {KERNELS} "
        f"executed, {len(uncovered)} not"
    )
    return 1 if complaints or share < arguments.fail_under else 0


if __name__ == "__main__":
    sys.exit(main())
