# SPDX-License-Identifier: BSD-3-Clause
"""Examples that no doctest runs: the first loop and both sides of each migration diff train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def side(page: Path, sign: str) -> str:
    """What the program of the page's one diff was ("-") or is ("+")."""
    (diff,) = re.findall(r"```diff\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = diff.splitlines(keepends=True)
    return "".join(line[1:] for line in lines if line[0] in (sign, " ", "\n"))


def trained(code: str) -> list[torch.Tensor]:
    """The parameters of a small model after a program's loop."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    scope: dict[str, Any] = {
        "torch": torch,
        "device": "cpu",
        "model": model,
        "loader": [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(5)],
        "loss_of": torch.nn.functional.cross_entropy,
    }
    before = model.weight.detach().clone()
    exec(compile(code, "diff", "exec"), scope)
    assert not torch.equal(before, model.weight)
    return [parameter.detach() for parameter in model.parameters()]


def test_the_first_loop_is_complete_and_trains() -> None:
    readme, index = (
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
        for page in (ROOT / "README.md", DOCS / "index.md")
    )
    assert readme == index
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(compile(readme, "README.md", "exec"), scope)
    assert scope["loss"].item() < 0.3  # from 0.7, the loss of a guess


def test_both_sides_of_the_diff_from_torch_train_alike() -> None:
    page = DOCS / "from_torch.md"
    assert "torchfuse" not in side(page, "-")
    torch.testing.assert_close(trained(side(page, "+")), trained(side(page, "-")))


def test_the_diff_from_apex_trains_without_apex() -> None:
    program = side(DOCS / "from_apex.md", "+")
    assert "apex" not in program
    trained(program)


def test_cpp_lines_of_the_migration_table_are_compiled() -> None:
    source = " ".join((DOCS / "examples" / "tour.cpp").read_text().split())
    rows = re.findall(r"^\| `.*?` \| (.*) \|$", (DOCS / "python_to_cpp.md").read_text(), re.M)
    assert len(rows) > 10
    lines = [line for row in rows for line in re.findall(r"`([^`]+)`", row)]
    assert [line for line in lines if line not in source] == []
