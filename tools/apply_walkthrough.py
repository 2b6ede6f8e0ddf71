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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


class WalkthroughError(Exception):
    """The page cannot be applied; the message names its line."""


@dataclass(frozen=True)
class Step:
    """One code block: a new file, or lines for an existing one beside the line with `anchor`."""

    line: int
    path: str
    code: str
    anchor: str
    after: bool


def parse(page: str, name: str) -> list[Step]:
    """The steps of a page, in its order."""
    steps = []
    for directive in DIRECTIVE.finditer(page):
        line = page.count("\n", 0, directive.start()) + 1
        found = STEP.match(page, directive.start())
        if found is None:
            raise WalkthroughError(
                f"{name}:{line}: expected '<!-- file: PATH -->' or '<!-- insert: PATH after|before "
                f'"TEXT" -->\', and a fenced block to follow and to end, got {directive[0]!r}.'
            )
        path, anchor = found["new"] or found["old"], found["anchor"] or ""
        steps.append(Step(line, path, found["code"], anchor, found["side"] == "after"))
    if not steps:
        raise WalkthroughError(f"{name}: expected code blocks to apply, got none.")
    return steps


def apply(steps: Sequence[Step], files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """`files` with all steps taken; a mistake in any of them raises and names its line."""
    result = dict(files)
    for step in steps:
        where = f"{name}:{step.line}"
        if not step.anchor:
            if step.path in result:
                raise WalkthroughError(f"{where}: expected {step.path} to be new, got an old file.")
            result[step.path] = step.code.encode()
            continue
        if step.path not in result:
            raise WalkthroughError(f"{where}: expected the file {step.path}, got none.")
        lines = result[step.path].decode().splitlines(keepends=True)
        found = [index for index, line in enumerate(lines) if step.anchor in line]
        if len(found) != 1:
            raise WalkthroughError(
                f"{where}: expected one line of {step.path} to hold {step.anchor!r}, "
                f"got {len(found)}. Write the anchor after the file as it is now."
            )
        lines.insert(found[0] + step.after, step.code)
        result[step.path] = "".join(lines).encode()
    return result


def main(page: str, tree: str) -> int:
    """Applies a page to a copy in the folder `tree`; returns 1 if it does not fit."""
    name = Path(page).name
    try:
        steps = parse(Path(page).read_text(encoding="utf-8"), name)
        files = apply(steps, source_files(ROOT), name)
    except WalkthroughError as error:
        print(f"apply_walkthrough: {error}", file=sys.stderr)
        return 1
    written = write_tree(files, Path(tree))
    print(f"apply_walkthrough: {len(steps)} blocks applied; {written} files of the copy changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
