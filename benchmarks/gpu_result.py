# SPDX-License-Identifier: BSD-3-Clause
"""The newest committed result of tools/gpu_run.sh, and the paragraph of three pages about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KIND = "gpu_run"
BEGIN, END = "<!-- last GPU run: begin -->", "<!-- last GPU run: end -->"
#: Where the paragraph stands, and from there the way to docs/testing.md and to the root.
PAGES = {
    "README.md": ("docs/testing.md", ""),
    "docs/index.md": ("testing.md", "../"),
    "docs/testing.md": ("", "../"),
}
WITHOUT_GPU = (
    "The CUDA kernels compile for four GPU architectures, and their source is tested on the CPU "
    "and on a pretended CUDA device."
)
#: Path below the root, and content.
Found = tuple[str, dict[str, Any]]


def latest(root: Path = ROOT) -> Found | None:
    """The newest result of a whole call, on a GPU."""
    results = [
        (path.relative_to(root).as_posix(), json.loads(path.read_text(encoding="utf-8")))
        for path in sorted((root / "benchmarks/results").glob("*/*.json"))
    ]
    ours = [
        (path, result)
        for path, result in results
        if result.get("kind") == KIND
        and result["call"] == "a"
        and result["machine"]["gpu"] not in (None, "pretended")
    ]
    return max(ours, key=lambda entry: str(entry[1]["date"])) if ours else None


def rows(found: Found) -> dict[str, Any]:
    """Figures of the benchmarks, by row."""
    stage = found[1]["stages"].get("benchmarks", {})
    return dict(stage.get("figures", {}).get("rows", {}))


def paragraph(root: Path, page: str) -> str:
    """When the CUDA kernels last ran on a GPU, and which stages have not passed."""
    testing, to_root = PAGES[page]
    proofs = f"[Testing]({testing}#what-only-a-gpu-can-show) says what each test proves."
    found = latest(root)
    if found is None:
        return f"**Nothing has run on a GPU yet.** {WITHOUT_GPU} {proofs}"
    path, result = found
    others = [
        f"{name} {stage['status']}"
        for name, stage in result["stages"].items()
        if stage["status"] != "passed"
    ]
    outcome = f"not every stage passed ({', '.join(others)})" if others else "every stage passed"
    if result["problems"]:
        outcome += f", and not all was as expected ({' '.join(result['problems'])})"
    return (
        f"**The last run on a GPU** was on {result['date'][:10]} (UTC), on one "
        f"{result['machine']['gpu']}, of commit `{result['sha'][:7]}`: {outcome}. Its "
        f"[result file]({to_root}{path}) has every stage. {WITHOUT_GPU} {proofs}"
    )


def placed(root: Path, page: str, text: str) -> str:
    """The text of a page with its paragraph, if it has one."""
    if page not in PAGES:
        return text
    marked = f"{BEGIN}\n{paragraph(root, page)}\n{END}"
    return re.sub(f"{BEGIN}.*?{END}", lambda _: marked, text, flags=re.DOTALL)
