# SPDX-License-Identifier: BSD-3-Clause
"""Formulas as MathML, which every current browser draws itself: no script and no network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def _convert(node: nodes.Element, *, as_block: bool) -> str:
    try:
        return str(latex2mathml.tex2mathml(node.astext(), as_block=as_block))
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return ""


def _visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_convert(node, as_block=False))
    raise nodes.SkipNode


def _visit_block(translator: Any, node: nodes.math_block) -> None:
    formula = _convert(node, as_block=True)
    translator.body.append(f'<div class="math-block" tabindex="0">{formula}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the renderer `mathml`."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
