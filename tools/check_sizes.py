# SPDX-License-Identifier: BSD-3-Clause
"""Checks that files and functions of C++ and Python are short enough to be read at once.

A function's lines are those of its body with the braces, or from `def` on without the docstring.
C++ is read by clang-format's layout: a body ends where a brace is indented like the head.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "python", "tests", "tools", "benchmarks", "examples")
FILE_LINES, FUNCTION_LINES = 600, 60

CONTAINER = re.compile(r"(template <.*> )?(inline )?(namespace|class|struct|enum|extern)\b[^()]*{")


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Each function's name and lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node.name, lines


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """The same of the functions in namespaces and classes."""
    head = name = end = ""
    begin = 0
    for number, line in enumerate(re.sub(r" *//.*", "", text).splitlines()):
        if end:
            if line.startswith(end):
                yield name, number - begin + 1
                end = ""
        elif not line or re.match(r" *[#}]", line) or line.endswith((":", ";", "}")):
            head = ""
        elif not line.endswith("{"):
            head += line + " "
        else:
            whole = head + line
            indent = " " * (len(whole) - len(whole.lstrip()))
            whole = re.sub(r" +|__attribute__\(\(\w+\)\)", " ", whole.strip())
            if not CONTAINER.fullmatch(whole):
                name = "".join(re.findall(r"\b(?!__)(\w+)\(", whole)[:1])
                end, begin = indent + "}", number
            head = ""


def main() -> int:
    """Prints every violation; returns 1 if there is one."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    listing = subprocess.check_output(command, cwd=ROOT, text=True)
    sizes = []
    for name in re.findall(r".+\.(?:py|h|cpp|cuh?)$", listing, re.MULTILINE):
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8")
            functions = python_functions if name.endswith(".py") else cpp_functions
            sizes.append((name, len(text.splitlines()), FILE_LINES))
            sizes += [(f"{name}:{of}", lines, FUNCTION_LINES) for of, lines in functions(text)]
    longer = [one for one in sizes if one[1] > one[2]]
    for name, lines, limit in longer:
        print(f"{name}: expected at most {limit} lines, got {lines}. Split it.", file=sys.stderr)
    print(f"check_sizes: {len(longer)} violations")
    return 1 if longer else 0


if __name__ == "__main__":
    raise SystemExit(main())
