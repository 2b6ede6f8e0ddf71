# SPDX-License-Identifier: BSD-3-Clause
"""Code in a sentence may be broken behind a separator, and never inside of a name."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_CODE = re.compile(r'<span class="pre">([^<]*)</span>')
_SEPARATOR = re.compile(r"(::|(?<![.])(?<!^)[.](?![.])|[/(,=])(?=[^\s)])")


def _in_pieces(code: re.Match[str]) -> str:
    pieces = _SEPARATOR.sub(r"\1\n", code[1]).split("\n")
    return "<wbr>".join(f'<span class="pre">{piece}</span>' for piece in pieces)


def with_breaks(html: str) -> str:
    """Marks where a browser may begin a new line, between pieces that it keeps whole."""
    return _CODE.sub(_in_pieces, html)


def _on_page(
    _app: Sphinx, _name: str, _template: str, context: dict[str, Any], _tree: nodes.document | None
) -> None:
    if "body" in context:
        context["body"] = with_breaks(context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects it to every page."""
    app.connect("html-page-context", _on_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
