# SPDX-License-Identifier: BSD-3-Clause
"""Every message that docs/troubleshooting.md quotes is provoked here or is in a source file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from provocations import PROVOCATIONS

# torch warns of a duplicate before our error.
pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *ROOT.glob("setup.py"),
    *(ROOT / "cmake").glob("*.cmake*"),
    *(ROOT / "python").glob("torchfuse/**/*.py"),
    *(ROOT / "csrc").glob("**/*.cpp"),
    *(ROOT / "csrc").glob("**/*.h"),
]


def quoted() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return [block.strip() for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)]


def message_of(provocation: Callable[[], object]) -> str:
    try:
        provocation()
    except (AssertionError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return str(error.args[0])
    raise AssertionError(f"expected an error from {provocation}, got none")


def as_pattern(message: str) -> re.Pattern[str]:
    return re.compile(".+".join(re.escape(part) for part in message.split("…")), re.DOTALL)


def in_sources(message: str) -> bool:
    """Whether all fixed parts of a message stand in one source file, string literals joined.

    Many are composed of "<op>: expected <argument>[<index>]" or a parameter's place,
    "to <property>" and a remedy.
    """
    composed = re.sub(r"^[\w.]+(: expected (\w+ of )?\w+\[(…\] of group …)?)?", "", message)
    parts = [part.strip(" .,:]") for part in re.split(r"…| to be | to ", composed)]
    parts = [part for part in parts if len(part) > 4]
    if not parts:
        return False
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        joined = re.sub(r'"\s*\n?\s*f?"', "", text).replace('\\"', '"')
        if all(part in joined for part in parts):
            return True
    return False


def test_every_quoted_message_is_one_of_ours() -> None:
    real = [message_of(provocation) for provocation in PROVOCATIONS]
    unknown = [
        message
        for message in quoted()
        if not any(as_pattern(message).fullmatch(text) for text in real) and not in_sources(message)
    ]
    assert unknown == []


def test_every_provocation_is_on_the_page() -> None:
    for provocation in PROVOCATIONS:
        message = message_of(provocation)
        assert any(as_pattern(entry).fullmatch(message) for entry in quoted()), message


def test_a_message_that_does_not_exist_is_noticed() -> None:
    assert not in_sources("torchfuse: expected the moon to be made of cheese, got ….")
