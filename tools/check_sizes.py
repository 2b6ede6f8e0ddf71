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
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "python", "tests", "tools", "benchmarks", "examples")
FILE_LINES, MOST_FILE_LINES, FUNCTION_LINES = 300, 500, 60

#: Longer files, and functions as "file:name", with their lines. Nothing is added, no number grows.
EXCEPTIONS: Mapping[str, int] = {
    "csrc/api/amp/grad_scaler_core.cpp": 307,
    "tests/cpp/api/parallel/data_parallel_program.cpp": 313,
    "tests/pretended_cuda/tests/test_nccl.py": 303,
}

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


def check(path: str, text: str, exceptions: Mapping[str, int] = EXCEPTIONS) -> list[str]:
    """Violations in one file, each as a sentence, and exceptions that it no longer needs."""
    functions = python_functions if path.endswith(".py") else cpp_functions
    sizes = [(path, len(text.splitlines()), FILE_LINES)]
    sizes += [(f"{path}:{name}", lines, FUNCTION_LINES) for name, lines in functions(text)]
    violations = []
    for name, lines, limit in sizes:
        if lines > min(exceptions.get(name, limit), MOST_FILE_LINES):
            violations.append(f"{name}: expected at most {limit} lines, got {lines}. Split it.")
    longer = {name for name, lines, limit in sizes if lines > limit}
    known = {name for name in exceptions if name.partition(":")[0] == path}
    violations += [f"{name}: expected no exception, it is short." for name in known - longer]
    return violations


def main() -> int:
    """Prints every violation; returns 1 if there is one."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    listing = subprocess.check_output(command, cwd=ROOT, text=True)
    names = set(re.findall(r".+\.(?:py|h|cpp|cuh?)$", listing, re.MULTILINE))
    files = {name: ROOT / name for name in sorted(names) if (ROOT / name).is_file()}
    violations = [v for name, path in files.items() for v in check(name, path.read_text("utf-8"))]
    gone = [name for name in EXCEPTIONS if name.partition(":")[0] not in files]
    violations += [f"{name}: expected no exception, the file is gone." for name in gone]
    for violation in violations:
        print(violation, file=sys.stderr)
    print(f"check_sizes: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
