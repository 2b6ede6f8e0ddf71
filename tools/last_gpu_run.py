# SPDX-License-Identifier: BSD-3-Clause
"""Says when the CUDA kernels last ran on a GPU, from the result files of tools/gpu_suite.sh alone.

Three pages have the same paragraph about it.

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
# Where the paragraph stands, and from there the way to docs/testing.md and to the root.
PAGES = {
    Path("README.md"): ("docs/testing.md", ""),
    Path("docs/index.md"): ("testing.md", "../"),
    Path("docs/testing.md"): ("", "../"),
}
RESULTS = Path("benchmarks/results")
BEGIN = "<!-- last GPU run: begin -->"
END = "<!-- last GPU run: end -->"
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
    """One clause, which names every stage that has not passed."""
    stages = [stage for part in result["parts"].values() for stage in part["stages"].items()]
    others = [f"{name} {stage['status']}" for name, stage in stages if stage["status"] != "passed"]
    if others:
        return f"not every stage passed ({', '.join(others)})"
    return "every stage passed" if result["passed"] else "some calls were not made"


def summarize(root: Path, page: Path) -> str:
    """The paragraph of one page."""
    testing, to_root = PAGES[page]
    proofs = f"[Testing]({testing}#what-only-a-gpu-can-show) says what each test proves."
    found = latest(root)
    if found is None:
        return f"**Nothing has run on a GPU yet.** {WITHOUT_GPU} {proofs}"
    path, result = found
    changes = " with uncommitted changes" if result["dirty"] else ""
    return (
        f"**The last run on a GPU** was on {result['date'][:10]} (UTC), on one {result['gpu']}, of "
        f"commit `{result['sha'][:7]}`{changes}: {outcome(result)}. Its "
        f"[result file]({to_root}{path.as_posix()}) has every stage. {WITHOUT_GPU} {proofs}"
    )


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
    pages = ", ".join(map(str, PAGES))
    action.add_argument("--write", action="store_true", help=f"update {pages}")
    action.add_argument("--check", action="store_true", help=f"compare with {pages}")
    options = parser.parse_args(arguments)
    try:
        texts = {path: updated(path, summarize(ROOT, path)) for path in PAGES}
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
