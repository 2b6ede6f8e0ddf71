# SPDX-License-Identifier: BSD-3-Clause
"""Applies the code blocks of a walk-through to a copy of the source tree.

A page says in a comment, which readers do not see, what the next fenced block is:

    <!-- file: PATH -->                     the whole of a new file
    <!-- insert: PATH after "TEXT" -->      lines to insert after the one line that holds TEXT
    <!-- insert: PATH before "TEXT" -->     the same, before that line

Everything is checked before anything is written. Files that already are as they should be stay
untouched, so that a build of the copy is incremental.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r"^<!--\s*(file|insert)\b(.*)-->\s*$")
FILE = re.compile(r"^:\s*(\S+)\s*$")
INSERT = re.compile(r'^:\s*(\S+)\s+(after|before)\s+"(.+)"\s*$')
FENCE = re.compile(r"^(`{3,})")
#: Names the files that the last run wrote, so that the next one can remove those that are gone.
RECORD = ".walkthrough"


class WalkthroughError(Exception):
    """The page cannot be applied; the message names its line."""


@dataclass(frozen=True)
class Step:
    """One code block: a new file, or lines for an existing one beside the line with `anchor`."""

    line: int
    path: str
    code: str
    anchor: str = ""
    after: bool = True


def parse(page: str, name: str) -> list[Step]:
    """The steps of a page, in its order."""
    lines = page.splitlines()
    steps = []
    for number, line in enumerate(lines, start=1):
        directive = DIRECTIVE.match(line)
        if directive is None:
            continue
        kind, rest = directive.groups()
        match = (FILE if kind == "file" else INSERT).match(rest)
        if match is None:
            raise WalkthroughError(
                f"{name}:{number}: expected '<!-- file: PATH -->' or "
                f"'<!-- insert: PATH after|before \"TEXT\" -->', got {line!r}."
            )
        code = _block(lines, number, name)
        if kind == "file":
            steps.append(Step(number, match[1], code))
        else:
            steps.append(Step(number, match[1], code, match[3], match[2] == "after"))
    if not steps:
        raise WalkthroughError(f"{name}: expected code blocks to apply, got none.")
    return steps


def _block(lines: list[str], number: int, name: str) -> str:
    """The fenced block whose opening is the first line with text behind line `number`."""
    start = number
    while start < len(lines) and not lines[start].strip():
        start += 1
    fence = FENCE.match(lines[start]) if start < len(lines) else None
    if fence is None:
        raise WalkthroughError(f"{name}:{number}: expected a fenced block to follow, got none.")
    for end in range(start + 1, len(lines)):
        if lines[end].rstrip() == fence[1]:
            return "".join(f"{line}\n" for line in lines[start + 1 : end])
    raise WalkthroughError(
        f"{name}:{start + 1}: expected the fenced block to end, got no {fence[1]}."
    )


def apply(steps: list[Step], files: dict[str, bytes], name: str) -> dict[str, bytes]:
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


def source_files(root: Path) -> dict[str, bytes]:
    """Contents of all files of a checkout that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = [path for path in listing.stdout.split("\0") if path and (root / path).is_file()]
    return {path: (root / path).read_bytes() for path in paths}


def write_tree(files: dict[str, bytes], tree: Path) -> int:
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
    tree.mkdir(parents=True, exist_ok=True)
    record.write_text("".join(f"{path}\n" for path in sorted(files)), encoding="utf-8")
    return written


def summary(steps: list[Step]) -> str:
    """How many files a page adds and how many it edits."""
    new = {step.path for step in steps if not step.anchor}
    edited = {step.path for step in steps if step.anchor}
    return f"{len(new)} new files, {len(edited)} edits"


def main(arguments: list[str] | None = None) -> int:
    """Applies a page, or only counts; returns 1 if the page does not fit the tree."""
    parser = argparse.ArgumentParser(description="Applies a walk-through to a copy of the tree.")
    parser.add_argument("page", type=Path, help="Markdown page with the steps")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to copy")
    parser.add_argument("--tree", type=Path, help="folder of the copy; without it, only count")
    options = parser.parse_args(arguments)
    name = options.page.name
    try:
        steps = parse(options.page.read_text(encoding="utf-8"), name)
        if options.tree is None:
            print(summary(steps))
            return 0
        files = apply(steps, source_files(options.root), name)
    except WalkthroughError as error:
        print(f"apply_walkthrough: {error}", file=sys.stderr)
        return 1
    written = write_tree(files, options.tree)
    print(f"apply_walkthrough: {summary(steps)}; {written} files of the copy changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
