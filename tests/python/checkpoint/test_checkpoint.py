# SPDX-License-Identifier: BSD-3-Clause
"""save_checkpoint and load_checkpoint in Python."""

from __future__ import annotations

import copy
import errno
import os
import random
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchfuse
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedLion

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def make() -> tuple[nn.Module, FusedAdam]:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return model, FusedAdam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW, torch.optim.SGD])
def test_a_run_continues_bit_for_bit(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(1)
    model, _ = make()
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    scaler = GradScaler("cpu", init_scale=4.0)
    train(model, optimizer)
    scheduler.step()
    path = tmp_path / "last.pt"
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    torchfuse.save_checkpoint(path, rng=True, values={"epoch": 3, "best": [0.5]}, **parts)
    train(model, optimizer)
    scheduler.step()

    resumed, _ = make()
    again = kind(resumed.parameters(), lr=7.0)
    rates = torch.optim.lr_scheduler.MultiStepLR(again, [9])
    fresh = GradScaler("cpu")
    values = torchfuse.load_checkpoint(
        path, rng=True, model=resumed, optimizer=again, scheduler=rates, scaler=fresh
    )
    train(resumed, again)
    rates.step()
    assert values == {"epoch": 3, "best": [0.5]}
    assert_same(resumed.state_dict(), model.state_dict())
    assert_same(again.state_dict(), optimizer.state_dict())
    assert fresh.get_scale() == 4.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    model, optimizer = make()
    train(model, optimizer)
    torchfuse.save_checkpoint(path, model=model, optimizer=optimizer)
    train(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    parts = {"model": model, "optimizer": optimizer}
    lion = FusedLion(model.parameters())
    wide = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"last.pt's 'lion' does not fit: FusedLion"):
        load_renamed(path, parts, lion)
    with pytest.raises(
        ValueError, match=r"\['0.weight'\] to have the shape \(4, 2\), got \(3, 2\)"
    ):
        torchfuse.load_checkpoint(path, optimizer=optimizer, model=wide)
    with pytest.raises(ValueError, match=r"last.pt to hold 'scaler', got \['lion', 'model'"):
        torchfuse.load_checkpoint(path, **parts, scaler=GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"expected epoch to have state_dict\(\).*got int"):
        torchfuse.load_checkpoint(path, epoch=3)  # type: ignore[arg-type]
    assert_same((model.state_dict(), optimizer.state_dict()), before)


def load_renamed(path: Path, parts: dict[str, Any], lion: FusedLion) -> None:
    contents = torch.load(path, weights_only=True)
    contents["lion"] = contents["optimizer"]
    torch.save(contents, path)
    torchfuse.load_checkpoint(path, **parts, lion=lion)


def test_truncated_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    path, cut = tmp_path / "last.pt", tmp_path / "cut.pt"
    model, _ = make()
    torchfuse.save_checkpoint(path, model=model, values={"tensor": torch.rand(8192)})
    whole = path.read_bytes()
    before = copy.deepcopy(model.state_dict())
    for size in [*range(0, len(whole), 4096), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"load_checkpoint: expected .*cut.pt to be a whole f"):
            torchfuse.load_checkpoint(cut, model=model)
    torch.save(model.state_dict(), cut)
    with pytest.raises(ValueError, match=r"cut.pt to be a file of save_checkpoint, got a file"):
        torchfuse.load_checkpoint(cut, model=model)
    torch.save(model, cut)
    with pytest.raises(ValueError, match=r"cut.pt to hold plain values and dense tensors only"):
        torchfuse.load_checkpoint(cut, model=model)
    with pytest.raises(ValueError, match="to be a file, got a folder"):
        torchfuse.load_checkpoint(tmp_path, model=model)
    with pytest.raises(FileNotFoundError, match=r"load_checkpoint: could not read .*none.pt: No"):
        torchfuse.load_checkpoint(tmp_path / "none.pt", model=model)
    assert_same(model.state_dict(), before)


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torchfuse.save_checkpoint(path, values={"number": 1})
    for bad in (random.Random(), {1.5: 2}, 2**64, torch.eye(2).to_sparse()):
        with pytest.raises(ValueError, match=r"expected the checkpoint\['values'\]\['bad'\] to"):
            torchfuse.save_checkpoint(path, values={"bad": bad})
    with pytest.raises(ValueError, match="to be a file, got a folder"):
        torchfuse.save_checkpoint(tmp_path, values={})
    assert torchfuse.load_checkpoint(path) == {"number": 1}


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torchfuse.save_checkpoint(path, values={"number": 1})
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for size in (0, 100, 40_000, 90_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with pytest.raises(OSError, match=r"could not write .*last.pt: .*unchanged") as caught:
                torchfuse.save_checkpoint(path, values={"tensor": torch.rand(25_000)})
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert caught.value.errno == errno.EFBIG
            assert torchfuse.load_checkpoint(path) == {"number": 1}
            assert os.listdir(tmp_path) == ["last.pt"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_symbolic_link_stays(tmp_path: Path) -> None:
    (tmp_path / "link.pt").symlink_to("real.pt")
    (tmp_path / "real.pt").touch()
    torchfuse.save_checkpoint(tmp_path / "link.pt", values={"number": 1})
    assert (tmp_path / "link.pt").is_symlink()
    assert torchfuse.load_checkpoint(tmp_path / "real.pt") == {"number": 1}


class Stubborn:
    """A part that loads nothing, not even what it has saved."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError(f"no {state['count']}")


def test_a_part_that_refuses_its_own_state_too_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torchfuse.save_checkpoint(path, part=Stubborn())
    message = "'part' does not fit: no 1 It could not be restored: no 1"
    with pytest.raises(ValueError, match=message):
        torchfuse.load_checkpoint(path, part=Stubborn())
