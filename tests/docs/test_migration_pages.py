# SPDX-License-Identifier: BSD-3-Clause
"""The pages on migration: what a diff shows runs, and the alias has what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from torchfuse.apex._registry import modules
from torchfuse.apex.native import amp_c

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
    table = section.partition("| module |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert len(listed) > 5
    assert {"amp_C", "apex.optimizers"} <= listed <= set(modules)


def test_the_page_lists_every_function_of_amp_c() -> None:
    section = FROM_APEX.partition("### amp_C and apex_C")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w.*?) \| ", section, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    short = {f"multi_tensor{name}" if name.startswith("_") else name for name in listed}
    assert short == set(amp_c.__all__)
