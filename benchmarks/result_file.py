# SPDX-License-Identifier: BSD-3-Clause
"""Where a benchmark's result goes, and which results the repository does not take."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import machine

#: What is committed here is shown by the documentation.
COMMITTED = Path(__file__).resolve().with_name("results")


def default_path(name: str) -> Path:
    """The file of a run that no path was named for."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return Path("build/benchmarks") / f"{name}-{now:%Y-%m-%dT%H%M%S}.json"


def prepare(path: Path | None, name: str) -> Path:
    """The result's path, in a folder that exists: before hours are spent on measuring.

    Raises:
        SystemExit: the path is that of a folder; or of a committed result, and the git tree has
            uncommitted changes: no commit would have the code that was measured.
    """
    path = path or default_path(name)
    if path.is_dir():
        raise SystemExit(f"expected --out to name a file, got the folder {path}; name one in it")
    if path.resolve().is_relative_to(COMMITTED) and machine.git("status", "--porcelain"):
        raise SystemExit(
            f"expected a clean git tree for a result in {COMMITTED.parent.name}/{COMMITTED.name}, "
            "got one with uncommitted changes; commit before you measure, or give another --out"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read(path: Path) -> dict[str, Any]:
    """A result.

    Raises:
        ValueError: there is no such file, no result in it, or a figure that is no number.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"expected a result file, got {path}: {error}") from error
    if not isinstance(result, dict):
        raise ValueError(f"expected a result file, got {path}, which holds no object")
    return result


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no figure")


def ratio(case: Mapping[str, Any], peer: str) -> float:
    """A peer's time over ours: the median of the ratios of single rounds."""
    return float(case["ratios"][peer]["per_round"]["median"])


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes the result."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
