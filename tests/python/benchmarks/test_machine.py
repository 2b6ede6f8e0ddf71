# SPDX-License-Identifier: BSD-3-Clause
"""What memory a benchmark may count on, in a container too."""

from __future__ import annotations

from pathlib import Path

import pytest

import machine


def group(folder: Path, **files: object) -> None:
    """A control group; two underscores stand for a point."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_limits_of_a_group_and_of_those_around_it(tmp_path: Path) -> None:
    group(tmp_path / "pod/box", memory__max="max", memory__current=5, memory__stat="anon 5")
    stat = "anon 10\ninactive_file 30\nactive_file 7"
    group(tmp_path / "pod", memory__max=100, memory__current=60, memory__stat=stat)
    assert list(machine.left_in_groups("0::/pod/box\n", tmp_path)) == [100 - 60 + 30]


def test_limits_of_the_first_version(tmp_path: Path) -> None:
    files = {"memory__limit_in_bytes": 100, "memory__usage_in_bytes": 60, "memory__stat": ""}
    group(tmp_path / "memory", **files)
    text = "8:pids:/elsewhere\n4:memory:/outside/of/the/container\n0::/\n"
    assert list(machine.left_in_groups(text, tmp_path)) == [40]


def test_a_limit_below_what_is_free_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine.available_mib()
    assert whole > 3
    monkeypatch.setattr(machine, "left_in_groups", lambda *_: iter([3 * 2**20]))
    assert machine.available_mib() == 3
