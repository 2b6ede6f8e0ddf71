# SPDX-License-Identifier: BSD-3-Clause
"""Applies the code blocks of a walk-through to a copy of the source tree.

A page says in a comment, which readers do not see, what the next fenced block is:

    <!-- file: PATH -->                     the whole of a new file
    <!-- insert: PATH after "TEXT" -->      lines to insert after the one line that holds TEXT
    <!-- insert: PATH before "TEXT" -->     the same, before that line

Everything is checked before anything is written.

    python tools/apply_walkthrough.py PAGE FOLDER
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from source_copy import source_files, write_tree

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r"^<!--\s*(file|insert)\b.*", re.MULTILINE)
# A fence ends with as many backticks as it began with: a block may hold shorter ones.
STEP = re.compile(
    r'<!-- (?:file: (?P<new>\S+)|insert: (?P<old>\S+) (?P<side>after|before) "(?P<anchor>.+)") -->'
    r"\s*^(?P<fence>`{3,})(?!`).*\n(?P<code>(?:.*\n)*?)(?P=fence)\s*$",
    re.MULTILINE,
)


def apply(page: str, files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """`files` with all blocks of a page applied.

    Raises:
        ValueError: the page cannot be applied; the message names its line.
    """
    result = dict(files)
    for directive in DIRECTIVE.finditer(page):
        line = page.count("\n", 0, directive.start()) + 1
        where = f"{name}:{line}"
        step = STEP.match(page, directive.start())
        if step is None:
            raise ValueError(
                f"{where}: expected '<!-- file: PATH -->' or '<!-- insert: PATH after|before "
                f'"TEXT" -->\', and a fenced block to follow and to end, got {directive[0]!r}.'
            )
        path, anchor = step["new"] or step["old"], step["anchor"]
        if step["new"] and path in result:
            raise ValueError(f"{where}: expected {path} to be new, got an old file.")
        if step["new"]:
            result[path] = step["code"].encode()
            continue
        if path not in result:
            raise ValueError(f"{where}: expected the file {path}, got none.")
        lines = result[path].decode().splitlines(keepends=True)
        found = [index for index, text in enumerate(lines) if anchor in text]
        if len(found) != 1:
            raise ValueError(
                f"{where}: expected one line of {path} to hold {anchor!r}, got {len(found)}. "
                "Write the anchor after the file as it is now."
            )
        lines.insert(found[0] + (step["side"] == "after"), step["code"])
        result[path] = "".join(lines).encode()
    if result == files:
        raise ValueError(f"{name}: expected code blocks to apply, got none.")
    return result


def main(page: str, tree: str) -> int:
    """Applies a page to a copy in the folder `tree`; returns 1 if it does not fit."""
    name = Path(page).name
    try:
        files = apply(Path(page).read_text(encoding="utf-8"), source_files(ROOT), name)
    except ValueError as error:
        print(f"apply_walkthrough: {error}", file=sys.stderr)
        return 1
    written = write_tree(files, Path(tree))
    print(f"apply_walkthrough: {name} applied; {written} files of the copy changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
