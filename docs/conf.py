# SPDX-License-Identifier: BSD-3-Clause
"""Configuration of the documentation site; `make docs` builds it. Needs no network."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

project = "torchfuse"
author = "the torchfuse authors"
copyright = f"2026, {author}"
release = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "breathe",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "api_index",
    "line_breaks",
    "mathml",
    "repository",
]
exclude_patterns = ["examples", "_ext", "_templates"]
templates_path = ["_templates"]
root_doc = "index"

# Every reference must resolve, except to what other projects document.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|dist|collections|typing|numpy|argparse|os)\..*"),
    # Types and defaults in argument lines.
    ("py:.*", r"default( .*)?|Iterable|Module|Optimizer|dtype|str|os\.PathLike|-?[\d.]+"),
    (
        "py:.*",
        r"(Update|HyperParams|Sampler|BasicOptions|MasterOptions|CommonOptions|StepOptions|Tensor|Any|Callable|Mapping|Sequence|optional"
        r"|dict|Dict\[.*|float|int)",
    ),
    ("cpp:identifier", r"(at|c10|c10d|torch|std)(::.*)?"),
    ("cpp:identifier", r"torchfuse(::amp|::nn|::optim|::parallel)?"),  # namespaces
    ("cpp:identifier", r"(Options|State|Self)"),  # template parameters
    ("cpp:identifier", r"(Optimizer.*|LossClosure|OptimizerCloneable.*|int64_t)"),
]

# Markdown

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Python

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
# Single backquotes in docstrings are code.
default_role = "code"
doctest_test_doctest_blocks = "default"

# C++

breathe_projects = {"torchfuse": str(ROOT / "build" / "docs" / "doxygen" / "xml")}
breathe_default_project = "torchfuse"
breathe_show_include = True
cpp_maximum_signature_line_length = 80
highlight_language = "none"

# HTML

toc_object_entries_show_parents = "hide"  # long names do not fit beside a page
html_theme = "furo"
html_title = f"torchfuse {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_search_scorer = str(ROOT / "docs/_ext/search_scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
