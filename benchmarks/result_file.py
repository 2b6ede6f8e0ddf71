# SPDX-License-Identifier: BSD-3-Clause
"""Reads and writes benchmark result files.

A result file contains the suite's name, the `context` of the measurement, and a list of
`benchmarks`, one per line. An entry contains sizes, quartiles of each contender's seconds, and
quartiles of the ratios per round, but no samples.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import environment

#: The documentation shows results that are committed here.
COMMITTED = Path(__file__).resolve().with_name("results")
DIGITS = 7


def default_path(name: str) -> Path:
    """Returns the result file's path for runs without --out."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return Path("build/benchmarks") / f"{name}-{now:%Y-%m-%dT%H%M%S}.json"


def prepare(path: Path | None, name: str) -> Path:
    """Returns the result's path after creating the folder, before measuring begins."""
    path = path or default_path(name)
    if path.is_dir():
        raise SystemExit(f"expected --out to name a file, got the folder {path}; name one in it")
    if path.resolve().is_relative_to(COMMITTED) and environment.git("status", "--porcelain"):
        raise SystemExit(
            f"expected a clean git tree for a result in {COMMITTED.parent.name}/{COMMITTED.name}, "
            "got one with uncommitted changes; commit before you measure, or give another --out"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read(path: Path) -> dict[str, Any]:
    """Reads a result file."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"expected a result file, got {path}: {error}") from error
    if not isinstance(result, dict):
        raise ValueError(f"expected a result file, got {path}, which holds no object")
    return result


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no figure")


def rounded(value: Any) -> Any:
    """Returns the value with floats rounded to seven significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [rounded(entry) for entry in value]
    return value


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result as compact JSON, with a line for each benchmark or curve."""
    parts = []
    for key, value in rounded(result).items():
        text = json.dumps(value, separators=(",", ":"))
        if key in ("benchmarks", "curves"):
            lines = [json.dumps(entry, separators=(",", ":")) for entry in value]
            text = "[\n" + ",\n".join(lines) + "\n]"
        parts.append(f"{json.dumps(key)}:{text}")
    path.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
