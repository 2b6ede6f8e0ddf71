# SPDX-License-Identifier: BSD-3-Clause
"""The walk-through fits the present tree; the program that applies it refuses what does not fit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from apply_walkthrough import (
    Step,
    WalkthroughError,
    apply,
    main,
    parse,
    source_files,
    summary,
    write_tree,
)

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/adding_an_optimizer.md"
FILES = {"list.txt": b"one\ntwo\nthree\n"}


def page(directive: str, code: str = "new\n") -> str:
    return f"# Title\n\n{directive}\n\n```text\n{code}```\n"


def applied(text: str) -> dict[str, bytes]:
    return apply(parse(text, "page.md"), FILES, "page.md")


def checkout(folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "list.txt").write_bytes(FILES["list.txt"])
    (folder / ".gitignore").write_text("ignored\n", encoding="utf-8")
    (folder / "ignored").write_text("", encoding="utf-8")
    return folder


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_the_page_fits_the_present_tree() -> None:
    steps = parse(PAGE.read_text(encoding="utf-8"), PAGE.name)
    files = apply(steps, source_files(ROOT), PAGE.name)
    assert all(step.path in files for step in steps)


def test_a_new_file() -> None:
    assert applied(page("<!-- file: a/b.txt -->"))["a/b.txt"] == b"new\n"


@pytest.mark.parametrize(
    ("side", "expected"),
    [("after", b"one\ntwo\nnew\nthree\n"), ("before", b"one\nnew\ntwo\nthree\n")],
)
def test_an_insertion(side: str, expected: bytes) -> None:
    assert applied(page(f'<!-- insert: list.txt {side} "two" -->'))["list.txt"] == expected


def test_a_block_may_hold_shorter_fences() -> None:
    text = "<!-- file: a.md -->\n````md\n```\ninner\n```\n````\n"
    assert applied(text)["a.md"] == b"```\ninner\n```\n"


def test_steps_build_on_each_other() -> None:
    text = page("<!-- file: a.txt -->", "x\n") + page('<!-- insert: a.txt after "x" -->', "y\n")
    assert applied(text)["a.txt"] == b"x\ny\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (page('<!-- insert: list.txt after "four" -->'), r"page\.md:3: .* hold 'four', got 0"),
        (page('<!-- insert: list.txt after "t" -->'), r"page\.md:3: .* hold 't', got 2"),
        (page('<!-- insert: other.txt after "one" -->'), r"page\.md:3: .*other\.txt, got none"),
        (page("<!-- file: list.txt -->"), r"page\.md:3: expected list\.txt to be new"),
        (page("<!-- insert: list.txt behind one -->"), r"page\.md:3: expected '<!-- file: PATH"),
        ("<!-- file: a -->\n\ntext\n", r"page\.md:1: expected a fenced block to follow"),
        ("<!-- file: a -->\n```\nx\n", r"page\.md:2: expected the fenced block to end"),
        ("# Title\n", r"page\.md: expected code blocks to apply, got none"),
    ],
    ids=["no-anchor", "two-anchors", "no-file", "old-file", "form", "no-block", "open", "empty"],
)
def test_a_page_that_does_not_fit_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(WalkthroughError, match=message):
        applied(text)


def test_main_fails_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = checkout(tmp_path / "root")
    bad = tmp_path / "page.md"
    bad.write_text(page("<!-- file: a.txt -->") + page('<!-- insert: list.txt after "no" -->'))
    assert main([str(bad), "--root", str(root), "--tree", str(tmp_path / "tree")]) == 1
    assert "page.md:10: expected one line of list.txt" in capsys.readouterr().err
    assert not (tmp_path / "tree").exists()


def test_main_copies_what_git_would_track(tmp_path: Path) -> None:
    root, tree = checkout(tmp_path / "root"), tmp_path / "tree"
    good = tmp_path / "page.md"
    good.write_text(page("<!-- file: a.txt -->"))
    assert main([str(good), "--root", str(root), "--tree", str(tree)]) == 0
    assert {path.name for path in tree.iterdir()} == {
        ".gitignore",
        ".walkthrough",
        "a.txt",
        "list.txt",
    }


def test_a_second_copy_touches_only_what_changed(tmp_path: Path) -> None:
    assert write_tree({"a": b"1", "b/c": b"2"}, tmp_path) == 2
    before = (tmp_path / "b/c").stat().st_mtime_ns
    assert write_tree({"b/c": b"2", "d": b"3"}, tmp_path) == 1
    assert (tmp_path / "b/c").stat().st_mtime_ns == before
    assert not (tmp_path / "a").exists()


def test_the_summary_counts_files() -> None:
    steps = [Step(1, "a", ""), Step(2, "b", "", "x"), Step(3, "b", "", "y")]
    assert summary(steps) == "1 new files, 1 edits"
