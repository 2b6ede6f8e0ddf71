# SPDX-License-Identifier: BSD-3-Clause
"""Lists of the API, made from the sources when the site is built, so that they leave nothing out.

These comments are replaced when a page is read:

    <!-- index of torchfuse.amp -->        one line for each class and function of a Python module
    <!-- index of cpp/amp.md -->           one line for each class and function of a C++ page
    <!-- classes of torchfuse.amp -->      the entries of a Python module's classes

Classes that most readers look for come first. Doxygen gives an inherited constructor the name of
the base; before a page is read, it gets the name of its class.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent.parent
DOXYGEN = DOCS.parent / "build" / "docs" / "doxygen" / "xml"

# What most readers look for, and what few do.
FIRST = ("FusedAdam", "GradScaler")
LAST = ("FusedOptimizer",)

_COMMENT = re.compile(r"^<!-- (index|classes) of (\S+) -->$", re.MULTILINE)
_QUALIFIED = re.compile(r"\b[A-Za-z_]\w*(?:(?:::|\.)[A-Za-z_]\w*)+(?:\(\))?")
_DIRECTIVE = re.compile(r"^```\{doxygen(class|function)\} ((?:\w|::)+)(?=[(\n])", re.MULTILINE)


def _as_code(text: str) -> str:
    """Marks qualified names as code, where they are not."""
    parts = text.replace("|", r"\|").split("`")
    parts[::2] = [_QUALIFIED.sub(r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def _table(rows: list[tuple[str, str]]) -> str:
    lines = [f"| {name} | {_as_code(text)} |" for name, text in rows]
    return "\n".join(["| name | description |", "|---|---|", *lines])


def python_names(module: str) -> list[tuple[str, Any]]:
    """The classes and functions of a module, in the order of its page; torch's own are left out."""
    holder = importlib.import_module(module)
    found = [(name, getattr(holder, name)) for name in holder.__all__]
    kept = [
        (name, value)
        for name, value in found
        if inspect.isclass(value) or inspect.isfunction(value)
        if not value.__module__.startswith("torch.")
    ]
    return sorted(kept, key=lambda entry: (entry[0] in LAST) - (entry[0] in FIRST))


def first_line(docstring: str) -> str:
    """A docstring's first line in Markdown."""
    line = docstring.splitlines()[0]
    line = re.sub(r":math:`([^`]*)`", r"$\1$", line)
    line = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", line)
    return line.replace("``", "`")


def python_index(module: str) -> str:
    """One line for each class and function of a Python module."""
    rows = []
    for name, value in python_names(module):
        role = "class" if inspect.isclass(value) else "func"
        rows.append((f"{{py:{role}}}`~{module}.{name}`", first_line(inspect.getdoc(value) or "")))
    return _table(rows)


def python_classes(module: str) -> str:
    """The entry of every class of a Python module."""
    entries = []
    for name, _ in python_names(module):
        option = ":inherited-members: Optimizer" if name in LAST else ":show-inheritance:"
        entries.append(f".. autoclass:: {module}.{name}\n   :members:\n   {option}\n")
    return "```{eval-rst}\n" + "\n".join(entries) + "```"


@cache
def cpp_briefs() -> dict[str, str]:
    """The first sentence about every class and function of C++, by its full name."""
    briefs = {}
    for path in sorted(DOXYGEN.glob("*.xml")):
        for compound in ElementTree.parse(path).getroot().iter("compounddef"):
            scope = compound.findtext("compoundname", "")
            members = compound.iter("memberdef") if compound.get("kind") == "namespace" else ()
            for entry, name in [
                (compound, scope),
                *((member, f"{scope}::{member.findtext('name', '')}") for member in members),
            ]:
                brief = entry.find("briefdescription")
                text = " ".join("".join(brief.itertext()).split()) if brief is not None else ""
                if text:
                    briefs.setdefault(name, text)
    return briefs


def cpp_index(page: str) -> str:
    """One line for each class and function of a C++ page."""
    text = (DOCS / "api" / page).read_text(encoding="utf-8")
    rows = {}
    for kind, name in _DIRECTIVE.findall(text):
        role = "class" if kind == "class" else "func"
        rows[f"{{cpp:{role}}}`~{name}`"] = cpp_briefs()[name].replace("<", "\\<")
    return _table(list(rows.items()))


def name_constructors(folder: Path) -> None:
    """Gives inherited constructors in Doxygen's output the names of their classes."""
    for path in folder.glob("class*.xml"):
        tree = ElementTree.parse(path)
        compound = tree.getroot().find("compounddef")
        base = compound.find("basecompoundref") if compound is not None else None
        if compound is None or base is None:
            continue
        scope, _, own = compound.findtext("compoundname", "").rpartition("::")
        base_name, _, arguments = (base.text or "").rpartition("::")[2].partition("<")
        options = arguments.strip(" >").split(",")[0]
        renamed = False
        for member in compound.iter("memberdef"):
            name = member.find("name")
            if name is None or name.text != base_name.strip():
                continue
            renamed = True
            name.text = own
            for tag, text in (
                ("definition", f"{scope}::{own}::{own}"),
                ("qualifiedname", f"{scope}::{own}::{own}"),
                ("argsstring", re.sub(r"\bOptions\b", options, member.findtext("argsstring", ""))),
            ):
                element = member.find(tag)
                if element is not None:
                    element.text = text
            for kind in member.iterfind("param/type"):
                if kind.text == "Options":
                    kind.text = options
        if renamed:
            tree.write(path, encoding="utf-8", xml_declaration=True)


def _replaced(match: re.Match[str]) -> str:
    what, of = match.groups()
    if what == "classes":
        return python_classes(of)
    return cpp_index(of) if of.endswith(".md") else python_index(of)


def _on_source_read(_app: Sphinx, _docname: str, source: list[str]) -> None:
    source[0] = _COMMENT.sub(_replaced, source[0])


def _on_start(_app: Sphinx) -> None:
    name_constructors(DOXYGEN)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the replacements."""
    app.connect("builder-inited", _on_start)
    app.connect("source-read", _on_source_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
