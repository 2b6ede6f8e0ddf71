# SPDX-License-Identifier: BSD-3-Clause
"""A copy of the source tree. What has not changed stays untouched: its builds are incremental."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

#: Names the files that the last call wrote, so that the next one can remove those that are gone.
RECORD = ".source_copy"


def source_files(root: Path) -> dict[str, bytes]:
    """Contents of all files of a checkout that git tracks or would track."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    paths = [path for path in listing.split("\0") if path and (root / path).is_file()]
    return {path: (root / path).read_bytes() for path in paths}


def write_tree(files: Mapping[str, bytes], tree: Path) -> int:
    """Makes `tree` hold `files`, and none that an earlier call wrote; returns how many it wrote."""
    record = tree / RECORD
    former = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    for path in set(former) - set(files):
        (tree / path).unlink(missing_ok=True)
    written = 0
    for path, content in files.items():
        target = tree / path
        if target.exists() and target.read_bytes() == content:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        if path.endswith(".sh") or content.startswith(b"#!"):
            target.chmod(0o755)
        written += 1
    record.write_text("".join(f"{path}\n" for path in sorted(files)), encoding="utf-8")
    return written
