# SPDX-License-Identifier: BSD-3-Clause
"""The walk-through fits the present tree; the program that applies it refuses what does not fit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import apply_walkthrough
import pytest
from apply_walkthrough import apply, main
from source_copy import RECORD, source_files, write_tree

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/adding_an_optimizer.md"
FILES = {"list.txt": b"one\ntwo\nthree\n"}


def page(directive: str, code: str = "new\n") -> str:
    return f"# Title\n\n{directive}\n\n```text\n{code}```\n"


def applied(text: str) -> dict[str, bytes]:
    return apply(text, FILES, "page.md")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_the_page_fits_the_present_tree() -> None:
    files = source_files(ROOT)
    assert apply(PAGE.read_text(encoding="utf-8"), files, PAGE.name).keys() > files.keys()


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (page("<!-- file: a/b.txt -->"), "a/b.txt", b"new\n"),
        (page('<!-- insert: list.txt after "two" -->'), "list.txt", b"one\ntwo\nnew\nthree\n"),
        (page('<!-- insert: list.txt before "two" -->'), "list.txt", b"one\nnew\ntwo\nthree\n"),
        # A block may hold shorter fences.
        ("<!-- file: a.md -->\n````md\n```\ninner\n```\n````\n", "a.md", b"```\ninner\n```\n"),
        # A step finds what those before it have made.
        (page("<!-- file: a -->") + page('<!-- insert: a after "new" -->'), "a", b"new\nnew\n"),
    ],
    ids=["new", "after", "before", "fences", "steps"],
)
def test_blocks_are_applied(text: str, name: str, expected: bytes) -> None:
    assert applied(text)[name] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (page('<!-- insert: list.txt after "four" -->'), r"page\.md:3: .* hold 'four', got 0"),
        (page('<!-- insert: list.txt after "t" -->'), r"page\.md:3: .* hold 't', got 2"),
        (page('<!-- insert: other.txt after "one" -->'), r"page\.md:3: .*other\.txt, got none"),
        (page("<!-- file: list.txt -->"), r"page\.md:3: expected list\.txt to be new"),
        (page("<!-- insert: list.txt behind one -->"), r"page\.md:3: expected .* behind one -->'"),
        ("<!-- file: a -->\n\ntext\n```\nx\n```\n", r"page\.md:1: expected .* block to follow"),
        ("<!-- file: a -->\n````\n```\nx\n```\n", r"page\.md:1: expected .* to end"),
        ("# Title\n", r"page\.md: expected code blocks to apply, got none"),
    ],
    ids=["no-anchor", "two-anchors", "no-file", "old-file", "form", "no-block", "open", "empty"],
)
def test_a_page_that_does_not_fit_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        applied(text)


def test_the_copy_has_what_git_would_track_and_is_made_only_if_all_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, tree, walkthrough = (tmp_path / name for name in ("root", "tree", "page.md"))
    monkeypatch.setattr(apply_walkthrough, "ROOT", root)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    for name, content in {**FILES, ".gitignore": b"ignored\n", "ignored": b""}.items():
        (root / name).write_bytes(content)
    text = page("<!-- file: a.txt -->")
    walkthrough.write_text(text + page('<!-- insert: list.txt after "no" -->'))
    assert main(str(walkthrough), str(tree)) == 1
    assert "page.md:10: expected one line of list.txt" in capsys.readouterr().err
    assert not tree.exists()
    walkthrough.write_text(text)
    assert main(str(walkthrough), str(tree)) == 0
    assert {path.name for path in tree.iterdir()} == {".gitignore", RECORD, "a.txt", "list.txt"}


def test_a_second_copy_touches_only_what_changed(tmp_path: Path) -> None:
    assert write_tree({"a": b"1", "b/c": b"2", "d": b"3"}, tmp_path) == 3
    before = (tmp_path / "b/c").stat().st_mtime_ns
    (tmp_path / "d").write_bytes(b"spoiled")
    (tmp_path / "built").touch()
    assert write_tree({"b/c": b"2", "d": b"3", "e": b"4"}, tmp_path) == 2
    assert (tmp_path / "b/c").stat().st_mtime_ns == before
    assert (tmp_path / "d").read_bytes() == b"3"
    assert {path.name for path in tmp_path.iterdir()} == {"b", "built", "d", "e", RECORD}
