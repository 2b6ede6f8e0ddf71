# SPDX-License-Identifier: BSD-3-Clause
"""Checks that C++ and Python files have at most 600 lines, and functions at most 60.

A function's docstring does not count. A C++ function is a block that clang-format indents by 0 or 2
spaces.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"{\n(?:(?:  .*|#.*|)\n)+}$|{\n(?:(?:    .*|#.*|)\n)+  }$", re.MULTILINE)


def functions(name: str, text: str) -> Iterator[tuple[int, int]]:
    """Yields each function's first line and number of lines."""
    if not name.endswith(".py"):
        for block in BLOCK.finditer(text):
            yield text.count("\n", 0, block.start()) + 1, block[0].count("\n") + 1
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = (ast.get_docstring(node, clean=False) or "").splitlines()
            yield node.lineno, (node.end_lineno or 0) - node.lineno + 1 - len(docstring)


listing = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
failed = False
for name in re.findall(r".+\.(?:py|h|cpp|cuh?)(?=\n)", listing.decode()):
    text = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).is_file() else ""
    for line, lines in [(1, text.count("\n")), *functions(name, text)]:
        if lines > (limit := 600 if line == 1 else 60):
            failed = True
            print(f"{name}:{line}: expected at most {limit} lines, got {lines}. Split it.")
print(f"check_sizes: {'failed' if failed else 'passed'}")
sys.exit(failed)
