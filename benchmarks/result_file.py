# SPDX-License-Identifier: BSD-3-Clause
"""Where a benchmark's result goes."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any


def default_path(name: str) -> Path:
    """The file of a run that no path was named for."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return Path("build/benchmarks") / f"{name}-{now:%Y-%m-%dT%H%M%S}.json"


def prepare(path: Path | None, name: str) -> Path:
    """The result's path, in a folder that exists: before hours are spent on measuring."""
    path = path or default_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes the result."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
