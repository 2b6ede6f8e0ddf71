# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint of several processes in C++: rank 0 writes, and all agree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.cpp_programs import cpp_program
from support.torchrun import torchrun

pytestmark = pytest.mark.processes


def test_rank_0_writes_and_all_ranks_load_or_none(tmp_path: Path) -> None:
    outcome = torchrun(3, cpp_program("ranks", tmp_path))
    assert outcome.status == 0, outcome.output
    files = [f"rank{rank}.txt" for rank in range(3)]
    assert sorted(os.listdir(tmp_path)) == ["last.pt", *files]
    drawn = set()
    for file in files:
        lines = (tmp_path / file).read_text(encoding="utf-8").splitlines()
        assert lines[:2] == ["epoch 3", "weight 1"]
        drawn.add(lines[2])
        assert lines[3] == "draws again 1"
        # The same words in all ranks.
        assert lines[4].startswith("save: save_checkpoint: ")
        assert f"{tmp_path}/none" in lines[4]
        assert lines[5].startswith(f"load: load_checkpoint: {tmp_path}/last.pt's 'model' does not ")
        assert "weight" in lines[5]
        assert "[2, 3]" in lines[5]
        assert lines[6:8] == ["kept 7", "then 4"]
        words = "alone: save_checkpoint: expected all 3 ranks of group 'torchfuse' in this call "
        assert [line.startswith(words) for line in lines[8:]] == [True] * (file == files[0])
    assert len(drawn) == 3
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    assert saved["model"]["weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert saved["values"] == {"epoch": 4}
