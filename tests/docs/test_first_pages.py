# SPDX-License-Identifier: BSD-3-Clause
"""README.md and the site's first page: what they show works, and they leave nothing out."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (DOCS / "index.md").read_text(encoding="utf-8")


def trained(code: str) -> list[torch.Tensor]:
    """The parameters after the README's loop."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(5)]
    scope: dict[str, Any] = {
        "torch": torch,
        "device": "cpu",
        "model": model,
        "loader": batches,
        "loss_of": torch.nn.functional.cross_entropy,
    }
    before = model.weight.detach().clone()
    exec(compile(code, "README.md", "exec"), scope)
    assert not torch.equal(before, model.weight)
    return [parameter.detach() for parameter in model.parameters()]


def side(diff: str, sign: str) -> str:
    """What the file was ("-") or is ("+")."""
    return "".join(
        line[1:] for line in diff.splitlines(keepends=True) if line[0] in (sign, " ", "\n")
    )


def test_both_sides_of_the_diff_run_and_train_alike() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert "torchfuse" not in side(diff, "-")
    torch.testing.assert_close(trained(side(diff, "+")), trained(side(diff, "-")))


def sources(page: str) -> set[str]:
    """The page, and the file that it shows where it is no more than that."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return {f"docs/{page}", *re.findall(r"\A<!-- include \.\./(\S+) -->\n\Z", text)}


def test_the_readme_links_every_page() -> None:
    entries = re.findall(r"```\{toctree\}\n(?::.*\n)*\n((?:\S+\n)*)```", INDEX)
    pages = [f"{name}.md" for name in "".join(entries).split()]
    assert len(pages) > 15
    links = {link.partition("#")[0] for link in re.findall(r"\]\((\S+?)\)", README)}
    assert [page for page in pages if not sources(page) & links] == []
    assert [link for link in sorted(links) if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("module", ["optimizers", "amp", "parallel"])
def test_first_pages_name_every_python_class(module: str) -> None:
    value = importlib.import_module(f"torchfuse.{module}")
    classes = [name for name in value.__all__ if inspect.isclass(getattr(value, name))]
    assert classes
    assert [n for n in classes if f"{{py:class}}`~torchfuse.{module}.{n}`" not in INDEX] == []
    for_users = set(classes) - {"FusedOptimizer", "ScaleHistory"}
    assert [name for name in sorted(for_users) if f"`{name}`" not in README] == []


def test_the_index_names_every_cpp_class() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api/cpp").glob("*.md"))
    classes = re.findall(r"```\{doxygenclass\} (\S+)", pages)
    assert len(classes) > 15
    assert [name for name in classes if f"{{cpp:class}}`~{name}`" not in INDEX] == []


def test_the_table_of_operators_is_complete() -> None:
    prefix = "torchfuse::"
    registered = {
        name.removeprefix(prefix).partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix)
    }
    page = (DOCS / "api/python/ops.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| \{cpp:func\}`~torchfuse::(\w+)` \|$", page, re.M))
    assert registered
    assert rows == {name: name for name in registered}
    typed = re.findall(r"\{py:func\}`~torchfuse\.ops\.(\w+)`", page)
    assert sorted(typed) == sorted(importlib.import_module("torchfuse.ops").__all__)
