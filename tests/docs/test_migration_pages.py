# SPDX-License-Identifier: BSD-3-Clause
"""The pages on migration: what a diff shows runs, and the alias has what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import torchfuse.apex._contents as contents

DOCS = Path(__file__).resolve().parents[2] / "docs"
FROM_TORCH, FROM_APEX = ((DOCS / f"from_{name}.md").read_text() for name in ("torch", "apex"))


def side(diff: str, sign: str) -> str:
    """What a program was ("-") or is ("+")."""
    return "".join(
        line[1:] for line in diff.splitlines(keepends=True) if line[0] in (sign, " ", "\n")
    )


def trained(code: str) -> list[torch.Tensor]:
    """The parameters of a small model after a program's loop."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    loader = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(5)]
    scope: dict[str, Any] = {"torch": torch, "device": "cpu", "model": model, "loader": loader}
    before = model.weight.detach().clone()
    exec(compile(code, "diff", "exec"), scope)
    assert not torch.equal(before, model.weight)
    return [parameter.detach() for parameter in model.parameters()]


def diff_of(page: str) -> str:
    (found,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    return str(found)


def test_both_sides_of_the_diff_from_torch_train_alike() -> None:
    diff = diff_of(FROM_TORCH)
    assert "torchfuse" not in side(diff, "-")
    torch.testing.assert_close(trained(side(diff, "+")), trained(side(diff, "-")))


def test_the_diff_from_apex_trains_without_apex() -> None:
    program = side(diff_of(FROM_APEX), "+")
    assert "apex" not in program
    trained(program)


def test_the_alias_has_the_modules_that_the_page_lists() -> None:
    section = FROM_APEX.partition("## The alias")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`apex\..*?) \| ", section, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(apex[\w.]+)`", row)}
    assert len(listed) > 5
    assert listed <= set(contents.modules())


def test_the_page_lists_no_part_as_missing_that_the_alias_has() -> None:
    section = FROM_APEX.partition("## What is there")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| no\b", section, re.MULTILINE)
    missing = {name for row in rows for name in re.findall(r"`(apex[\w.]+)`", row)}
    assert "apex.amp" in missing
    assert missing & set(contents.modules()) == {"apex.contrib"}  # "the rest of"
