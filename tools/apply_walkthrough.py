# SPDX-License-Identifier: BSD-3-Clause
"""Applies a walk-through's code blocks to a copy of the source tree.

An HTML comment on the page says how to apply the next fenced block:

    <!-- file: PATH -->                     a new file
    <!-- insert: PATH after "TEXT" -->      lines to insert after the one line that contains TEXT
    <!-- insert: PATH before "TEXT" -->     lines to insert before that line

    python tools/apply_walkthrough.py PAGE FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A closing fence has as many backticks as the opening fence, so a block may contain shorter fences.
STEP = re.compile(
    r'<!-- (?:file: (?P<new>\S+)|insert: (?P<old>\S+) (?P<side>after|before) "(?P<anchor>.+)") -->'
    r"\s*^(?P<fence>`{3,})(?!`).*\n(?P<code>(?:.*\n)*?)(?P=fence)\s*$",
    re.MULTILINE,
)


def source_files(root: Path) -> dict[str, bytes]:
    """Returns the contents of all files in a checkout that git tracks or does not ignore."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listing = subprocess.check_output(command, cwd=root, text=True).split("\0")
    return {path: (root / path).read_bytes() for path in listing if (root / path).is_file()}


def write_tree(files: Mapping[str, bytes], tree: Path) -> None:
    """Writes `files` to `tree`, and leaves unchanged files alone so that builds are incremental.

    Files from an earlier call, listed in .source_copy, are removed if `files` lacks them.
    """
    record = tree / ".source_copy"
    former = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    for path in {*former} - {*files}:
        (tree / path).unlink(missing_ok=True)
    for path, content in files.items():
        target = tree / path
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o755 if content.startswith(b"#!") else 0o644)
    record.write_text("\n".join(files), encoding="utf-8")


def apply(page: str, files: dict[str, bytes]) -> None:
    """Applies all blocks on a page to `files`; exits with the line of the first invalid block."""
    for directive in re.finditer(r"^<!--\s*(file|insert)\b.*", page, re.MULTILINE):
        where = f"apply_walkthrough: line {page.count(chr(10), 0, directive.start()) + 1}"
        step = STEP.match(page, directive.start())
        if step is None:
            sys.exit(f"{where}: expected a directive and a fenced block, got {directive[0]!r}.")
        path, anchor = step["new"] or step["old"], step["anchor"]
        if (path in files) == bool(step["new"]):
            sys.exit(f"{where}: expected {path} to be {'new' if step['new'] else 'in the tree'}.")
        if step["new"]:
            files[path] = step["code"].encode()
            continue
        lines = files[path].decode().splitlines(keepends=True)
        found = [index for index, text in enumerate(lines) if anchor in text]
        if len(found) != 1:
            sys.exit(f"{where}: expected one line of {path} with {anchor!r}, got {len(found)}.")
        lines.insert(found[0] + (step["side"] == "after"), step["code"])
        files[path] = "".join(lines).encode()


if __name__ == "__main__":
    sources = source_files(ROOT)
    apply(Path(sys.argv[1]).read_text(encoding="utf-8"), sources)
    write_tree(sources, Path(sys.argv[2]))
