# SPDX-License-Identifier: BSD-3-Clause
"""The site as it is built: its lists of the API, and code that fits."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from test_api_pages import SITE, public_objects

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WIDTH = 85

sys.path.insert(0, str(DOCS / "_ext"))
from api_index import first_line  # noqa: E402
from line_breaks import with_breaks  # noqa: E402


def page(name: str) -> str:
    return (SITE / name).read_text(encoding="utf-8")


def test_the_index_has_every_public_class_and_function() -> None:
    index = page("api/index.html")
    names = [name for name, _ in public_objects()]
    assert len(names) > 30
    assert [name for name in names if f'title="{name}"' not in index] == []


@pytest.mark.parametrize(
    ("name", "separator"),
    [("api/python/optimizers.html", "torchfuse.optimizers."), ("api/cpp/optim.html", "")],
)
def test_adam_is_the_first_optimizer(name: str, separator: str) -> None:
    entries = re.findall(
        rf'<dt class="sig [^"]*" id="([^"]*{re.escape(separator)}[^"]*)"', page(name)
    )
    assert "FusedAdam" in entries[0]


def test_constructors_have_the_names_of_their_classes() -> None:
    names = re.findall(
        r'id="torchfuse::optim::(Fused\w+)::(Fused\w+)__', page("api/cpp/optim.html")
    )
    assert len(names) > 10
    assert [pair for pair in names if pair[0] != pair[1]] == []


def test_code_breaks_behind_separators_alone() -> None:
    code = '<code class="docutils literal"><span class="pre">torch::nn.a_name(x)</span></code>'
    pieces = re.findall(r'<span class="pre">([^<]*)</span>', with_breaks(code))
    assert pieces == ["torch::", "nn.", "a_name(", "x)"]
    assert with_breaks("<p>a.b</p>") == "<p>a.b</p>"


def test_first_lines_become_markdown() -> None:
    docstring = "Sets ``a`` as :func:`~b.c` with :math:`x`.\n\nMore."
    assert first_line(docstring) == "Sets `a` as `b.c` with $x$."


def test_code_on_pages_fits() -> None:
    wide = []
    for source in DOCS.rglob("*.md"):
        # Its blocks are the sources that they become, as wide as sources are.
        if source.name == "adding_an_optimizer.md":
            continue
        blocks = re.findall(
            r"^```(?:sh|cpp|python|diff|cmake|\{doctest\} \S+)\n(.*?)^```",
            source.read_text(encoding="utf-8"),
            re.DOTALL | re.MULTILINE,
        )
        lines = [line for block in blocks for line in block.splitlines()]
        wide += [(source.name, line) for line in lines if len(line) > WIDTH]
    assert wide == []
