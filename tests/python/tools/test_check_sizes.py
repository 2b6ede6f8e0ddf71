# SPDX-License-Identifier: BSD-3-Clause
"""tools/check_sizes.py: how long files and functions are, and what its exceptions allow."""

from __future__ import annotations

import pytest
from check_sizes import check

BODY = "  x = 1;\n" * 59
HEADS = {
    "namespace": "namespace a {\nnamespace {\nint f() {\n@}\n}\n}  // namespace a\n",
    "method": "class A : B {\n public:\n  A() {}\n  int f(\n      A a) const {\n@  }\n};\n",
    "constructor": "f::f(int a)\n    : a_(a),\n      b_{a} {  // once\n@}\n",
    "template": "/// Adds.\ntemplate <class T>\n__attribute__((noinline)) T f(T a) {\n@}\n",
    "test": "TEST(f, Adds) {\n@}\n",
}


@pytest.mark.parametrize("head", HEADS)
def test_a_long_function_of_cpp(head: str) -> None:
    assert check("a.cpp", HEADS[head].replace("@", BODY[9:])) == []
    (violation,) = check("a.cpp", HEADS[head].replace("@", BODY))
    assert "expected at most 60 lines, got 61" in violation


def test_a_long_function_of_python_without_its_docstring() -> None:
    lines = [f"    {line}\n" for line in ('"""A', "", 'B."""', *["x = 1"] * 59)]
    assert check("a.py", "def f():\n" + "".join(lines)) == []
    assert check("a.py", "def f():\n" + "".join(lines) + "    return x\n") == [
        "a.py:f: expected at most 60 lines, got 61. Split it."
    ]


def test_exceptions_neither_grow_nor_stay_for_nothing() -> None:
    known = {"a.py": 310, "b.py": 900}
    assert check("a.py", "x = 1\n" * 310, known) == []
    assert "expected at most 300 lines, got 311" in check("a.py", "x = 1\n" * 311, known)[0]
    assert "expected no exception" in check("a.py", "x = 1\n" * 300, known)[0]
    assert "got 501" in check("b.py", "x = 1\n" * 501, known)[0]
