# SPDX-License-Identifier: BSD-3-Clause
"""Says when the CUDA kernels last ran on a GPU, from the result files of tools/gpu_suite.sh alone.

Example:
    python tools/last_gpu_run.py --write   put it into docs/testing.md
    python tools/last_gpu_run.py --check   exit with 1 if docs/testing.md says anything else
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/testing.md")
RESULTS = Path("benchmarks/results")
BEGIN = "<!-- last GPU run: begin -->"
END = "<!-- last GPU run: end -->"
NEVER = (
    "The CUDA kernels have never run on a GPU: `benchmarks/results` holds no result of "
    "`tools/gpu_suite.sh`."
)


def describe(root: Path) -> str:
    """The section as Markdown, without the markers: the latest result of the suite on a GPU."""
    # Other benchmark results lie in the same folders.
    results = [
        (path.relative_to(root), json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((root / RESULTS).glob("*/*.json"))
    ]
    ours = [(p, r) for p, r in results if r.get("kind") == "gpu_suite" and r["gpu"] is not None]
    if not ours:
        return NEVER
    path, result = max(ours, key=lambda entry: str(entry[1]["date"]))
    changed = " with uncommitted changes" if result["dirty"] else ""
    outcome = "every stage passed" if result["passed"] else "not every stage of three calls passed"
    lines = [
        f"Last run of `tools/gpu_suite.sh`: {result['date'][:10]} (UTC), commit "
        f"`{result['sha'][:7]}`{changed}, {result['gpu']}: {outcome}. "
        f"Everything is in [`{path.as_posix()}`](../{path.as_posix()}).",
        "",
        "| call | stage | outcome | seconds | |",
        "|---|---|---|---:|---|",
    ]
    for call, part in result["parts"].items():
        machine = part["machine"]
        versions = ", ".join(f"{name} {machine[name]}" for name in ("driver", "nvcc", "torch"))
        lines.append(f"| {call} | | | | {versions} |")
        for name, stage in part["stages"].items():
            notes = "; ".join(text for text in (stage["reason"], stage.get("key")) if text)
            notes = notes.replace("|", "\\|").replace("\n", " ")
            lines.append(f"| | {name} | {stage['status']} | {stage['seconds']:.1f} | {notes} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help=f"update {PAGE}")
    action.add_argument("--check", action="store_true", help=f"compare with {PAGE}")
    options = parser.parse_args(arguments)
    path = ROOT / PAGE
    try:
        page = path.read_text(encoding="utf-8")
        section = f"{BEGIN}\n{describe(ROOT)}\n{END}"
        wanted, times = re.subn(f"{BEGIN}.*?{END}", lambda _: section, page, flags=re.DOTALL)
        if not times == page.count(BEGIN) == page.count(END) == 1:
            raise ValueError(f"expected {PAGE} to hold one line {BEGIN}, and behind it {END}")
        if options.check and page != wanted:
            raise ValueError(
                f"expected {PAGE} to report the newest result file. "
                "Run `python tools/last_gpu_run.py --write`."
            )
    except (OSError, ValueError) as error:
        print(f"last_gpu_run: {error}", file=sys.stderr)
        return 1
    if options.write:
        path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
