# SPDX-License-Identifier: BSD-3-Clause
"""Says when the CUDA kernels last ran on a GPU, from the result files of tools/gpu_suite.sh alone.

docs/testing.md gets all of it; README.md and the site's first page get a paragraph.

Example:
    python tools/last_gpu_run.py --write   put it into these pages
    python tools/last_gpu_run.py --check   exit with 1 if one of them says anything else
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/testing.md")
# Where a paragraph stands, and from there the way to the page.
SUMMARIES = {Path("README.md"): "docs/testing.md", Path("docs/index.md"): "testing.md"}
RESULTS = Path("benchmarks/results")
BEGIN = "<!-- last GPU run: begin -->"
END = "<!-- last GPU run: end -->"
NEVER = (
    "The CUDA kernels have never run on a GPU: `benchmarks/results` holds no result of "
    "`tools/gpu_suite.sh`."
)
WITHOUT_GPU = (
    "The CUDA kernels compile for four GPU architectures, and their source is tested on the CPU "
    "and on a pretended CUDA device."
)


def latest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest result of the suite on a GPU, and its path below the root."""
    # Other benchmark results lie in the same folders.
    results = [
        (path.relative_to(root), json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((root / RESULTS).glob("*/*.json"))
    ]
    ours = [(p, r) for p, r in results if r.get("kind") == "gpu_suite" and r["gpu"] is not None]
    return max(ours, key=lambda entry: str(entry[1]["date"])) if ours else None


def outcome(result: dict[str, Any]) -> str:
    """One clause."""
    return "every stage passed" if result["passed"] else "not every stage of three calls passed"


def summarize(root: Path, page: str) -> str:
    """The paragraph for readers who are new, with a link to `page`."""
    link = f"{page}#the-last-run-on-a-gpu"
    found = latest(root)
    if found is None:
        return (
            f"**Nothing has run on a GPU yet.** {WITHOUT_GPU} [Testing]({link}) says what that "
            "proves, and what only a GPU can show."
        )
    result = found[1]
    return (
        f"**The last run on a GPU** was on {result['date'][:10]}, on one {result['gpu']}: "
        f"{outcome(result)}. {WITHOUT_GPU} [Testing]({link}) has that run, and says what each test "
        "proves."
    )


def describe(root: Path) -> str:
    """The section as Markdown, without the markers: the latest result of the suite on a GPU."""
    found = latest(root)
    if found is None:
        return NEVER
    path, result = found
    changed = " with uncommitted changes" if result["dirty"] else ""
    lines = [
        f"Last run of `tools/gpu_suite.sh`: {result['date'][:10]} (UTC), commit "
        f"`{result['sha'][:7]}`{changed}, {result['gpu']}: {outcome(result)}. "
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


def updated(path: Path, section: str) -> tuple[str, str]:
    """A page as it is, and with the section between its markers.

    Raises:
        ValueError: the markers are not there, or not once.
    """
    page = (ROOT / path).read_text(encoding="utf-8")
    marked = f"{BEGIN}\n{section}\n{END}"
    wanted, times = re.subn(f"{BEGIN}.*?{END}", lambda _: marked, page, flags=re.DOTALL)
    if not times == page.count(BEGIN) == page.count(END) == 1:
        raise ValueError(f"expected {path} to hold one line {BEGIN}, and behind it {END}")
    return page, wanted


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the sections."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    pages = ", ".join(path.as_posix() for path in (PAGE, *SUMMARIES))
    action.add_argument("--write", action="store_true", help=f"update {pages}")
    action.add_argument("--check", action="store_true", help=f"compare with {pages}")
    options = parser.parse_args(arguments)
    try:
        sections = {PAGE: describe(ROOT)}
        sections |= {path: summarize(ROOT, page) for path, page in SUMMARIES.items()}
        texts = {path: updated(path, section) for path, section in sections.items()}
        for path, (page, wanted) in texts.items():
            if options.check and page != wanted:
                raise ValueError(
                    f"expected {path} to report the newest result file. "
                    "Run `python tools/last_gpu_run.py --write`."
                )
    except (OSError, ValueError) as error:
        print(f"last_gpu_run: {error}", file=sys.stderr)
        return 1
    if options.write:
        for path, (_, wanted) in texts.items():
            (ROOT / path).write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
