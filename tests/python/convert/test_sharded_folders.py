# SPDX-License-Identifier: BSD-3-Clause
"""Folders with a file for each rank: exact round trips, and what is refused.

tests/python/parallel/test_sharded_files.py exchanges them with C++.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import assert_same_state, mark_as_folder, shared_params, shared_steps
from support.sharded import STORAGE
from torch import Tensor, nn

import torchfuse
from torchfuse.convert import read_sharded_checkpoint, write_sharded_checkpoint
from torchfuse.optimizers import FusedAdam
from torchfuse.testing import OPTIM_SPECS, OptimSpec


def state_of(spec: OptimSpec, storage: str) -> dict[str, Any]:
    dtype, options = STORAGE[storage]
    make: Any = spec.optimizer
    optimizer = make(shared_params(dtype), **{**spec.grid[-1], **options})
    shared_steps(optimizer, 0, 2)
    state: dict[str, Any] = optimizer.state_dict()
    return state


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("spec", OPTIM_SPECS, ids=lambda spec: spec.optimizer.__name__)
def test_round_trip_is_exact(spec: OptimSpec, world_size: int, tmp_path: Path) -> None:
    for storage in STORAGE:
        expected = state_of(spec, storage)
        write_sharded_checkpoint({"optimizer": expected}, tmp_path, world_size)
        found = read_sharded_checkpoint(tmp_path)["optimizer"]
        used = {
            index: {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for index, state in expected["state"].items()
        }
        saved = {index: {key: found["state"][index][key] for key in used[index]} for index in used}
        assert_same_state(saved, used)
        assert found["param_groups"] == expected["param_groups"]
        assert len(list(tmp_path.iterdir())) == world_size + 1


def test_a_file_of_save_checkpoint_is_cut_and_joined(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    shared_steps(optimizer, 0, 1)
    parts = {"model": model, "optimizer": optimizer}
    torchfuse.save_checkpoint(tmp_path / "one.pt", values={"epoch": 3}, **parts)
    one = torch.load(tmp_path / "one.pt")
    write_sharded_checkpoint(one, tmp_path / "files", world_size=3)
    joined = read_sharded_checkpoint(tmp_path / "files")
    assert joined["torchfuse"] == one["torchfuse"]
    assert joined["optimizer"]["state"][0]["exp_avg"].stride() == model.weight.stride()
    torch.save(joined, tmp_path / "joined.pt")
    again = nn.Conv2d(3, 4, 3)
    other = FusedAdam(again.parameters())
    found = torchfuse.load_checkpoint(tmp_path / "joined.pt", model=again, optimizer=other)
    assert found == {"epoch": 3}
    assert torch.equal(again.weight, model.weight)
    assert_same_state(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    optimizer = FusedAdam(shared_params(), lr=0.1)
    shared_steps(optimizer, 0, 1)
    write_sharded_checkpoint({"optimizer": optimizer.state_dict()}, tmp_path, world_size=2)
    return tmp_path


def test_a_missing_file(folder: Path) -> None:
    (path,) = folder.glob("rank1-*.pt")
    size = path.stat().st_size
    path.unlink()
    message = (
        f"read_sharded_checkpoint: expected {path} to be a file of {size} bytes, as index.pt "
        "says, got none. Load another checkpoint, or this one again if it was saved meanwhile."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_sharded_checkpoint(folder)


def test_a_truncated_file(folder: Path) -> None:
    (path,) = folder.glob("rank0-*.pt")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"got {len(data) - 1} bytes"):
        read_sharded_checkpoint(folder)


def test_a_damaged_file(folder: Path) -> None:
    (path,) = folder.glob("rank0-*.pt")
    data = bytearray(path.read_bytes())
    # Bytes of a record lie behind its name, at multiples of 64.
    data[(data.index(b"data/0") + 128) // 64 * 64] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"expected {re.escape(str(path))} to (have|be)"):
        read_sharded_checkpoint(folder)


def test_a_missing_index(folder: Path) -> None:
    (folder / "index.pt").unlink()
    with pytest.raises(ValueError, match=r"index.pt to be a file, got none\.$"):
        read_sharded_checkpoint(folder)


def test_a_pipe_as_an_index(folder: Path) -> None:
    (folder / "index.pt").unlink()
    os.mkfifo(folder / "index.pt")
    with pytest.raises(ValueError, match=r"index.pt to be a file, got none\.$"):
        read_sharded_checkpoint(folder)


def test_a_file_of_one_checkpoint_as_an_index(folder: Path) -> None:
    torchfuse.save_checkpoint(folder / "index.pt")
    with pytest.raises(ValueError, match=r"index.pt to hold 'sharded', got \[torchfuse, values\]"):
        read_sharded_checkpoint(folder)


@pytest.mark.parametrize("spans", [[(0, 0, 1)], [(0, 1, 185)], [(7, 0, 185)], [(0, 0)], None])
def test_an_index_that_does_not_describe_the_files(folder: Path, spans: Any) -> None:
    index = torch.load(folder / "index.pt")
    index["checkpoint"]["optimizer"]["state"][0]["exp_avg"]["spans"] = spans
    torch.save(index, folder / "index.pt")
    with pytest.raises(ValueError, match=r"index.pt to describe the tensors in the files of ranks"):
        read_sharded_checkpoint(folder)


@pytest.mark.parametrize("place", [{"strides": (2,)}, {"strides": (0,)}, {"sizes": (2**64,)}])
def test_an_index_of_other_sizes_and_strides(folder: Path, place: dict[str, Any]) -> None:
    index = torch.load(folder / "index.pt")
    index["checkpoint"]["optimizer"]["state"][2]["exp_avg"].update(place)
    torch.save(index, folder / "index.pt")
    with pytest.raises(ValueError, match=r"index.pt to describe the tensors in the files of ranks"):
        read_sharded_checkpoint(folder)


@pytest.mark.parametrize("pair", [("../rank0.pt", 9), ("rank0.pt",), ["rank0.pt", 9], (0, 9)])
def test_an_index_that_names_no_files_beside_it(folder: Path, pair: Any) -> None:
    index = torch.load(folder / "index.pt")
    index["sharded"]["files"][0] = pair
    torch.save(index, folder / "index.pt")
    message = f"to hold pairs of the names of files beside it and bytes, got {pair!r}."
    with pytest.raises(ValueError, match=rf"index.pt {re.escape(message)}$"):
        read_sharded_checkpoint(folder)


def test_a_refused_value_leaves_the_checkpoint_before(folder: Path) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=r"write_sharded_checkpoint: expected parts\['scaler'\]"):
        write_sharded_checkpoint({"scaler": {"scale": object()}}, folder, world_size=2)
    assert sorted(folder.iterdir()) == before
    assert read_sharded_checkpoint(folder)["values"] == {}


def test_keys_that_cpp_does_not_read(folder: Path) -> None:
    message = "write_sharded_checkpoint: expected parts['values'] to have strings as keys, got 1."
    with pytest.raises(ValueError, match=f"^{re.escape(message)} Save str\\(key\\).$"):
        write_sharded_checkpoint({"values": {1: 2}}, folder, world_size=2)


def test_a_save_that_fails_leaves_no_files(folder: Path) -> None:
    optimizer = read_sharded_checkpoint(folder)["optimizer"]
    elsewhere = folder / "other"
    (elsewhere / "index.pt").mkdir(parents=True)
    with pytest.raises(ValueError, match="got a folder"):
        write_sharded_checkpoint({"optimizer": optimizer}, elsewhere, world_size=2)
    assert [path.name for path in elsewhere.iterdir()] == ["index.pt"]


def test_the_files_before_are_removed_and_others_stay(folder: Path) -> None:
    before = set(folder.glob("rank*"))
    own = {folder / name for name in ("notes", "index.pt.tmp-notes", "rank0-notes.pt")}
    killed = folder / "index.pt.tmp-0123456789abcdef"  # of a save that was killed
    for path in (*own, killed):
        path.touch()
        os.utime(path, (0, 0))
    write_sharded_checkpoint({"values": {"epoch": 4}}, folder, world_size=3)
    after = set(folder.iterdir())
    assert not (before | {killed}) & after
    assert own < after
    assert len(after) == 4 + len(own)
    assert read_sharded_checkpoint(folder)["values"] == {"epoch": 4}


def test_no_files(tmp_path: Path) -> None:
    message = "write_sharded_checkpoint: expected world_size to be at least 1, got 0."
    with pytest.raises(ValueError, match=message):
        write_sharded_checkpoint({}, tmp_path, world_size=0)


def test_links_to_the_files_of_another_checkpoint_leave_it_alone(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    links = tmp_path_factory.mktemp("links")
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
    assert read_sharded_checkpoint(links)["values"] == {}
    write_sharded_checkpoint({"values": {"epoch": 4}}, links, world_size=1)
    assert read_sharded_checkpoint(links)["values"] == {"epoch": 4}
    assert read_sharded_checkpoint(folder)["values"] == {}


def test_a_link_to_nothing_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"to be a folder or a new name, got a file or a link"):
        write_sharded_checkpoint({}, tmp_path / "link", world_size=1)


def test_a_tensor_that_one_bit_says_is_a_folder_is_refused(folder: Path) -> None:
    (path,) = folder.glob("rank0-*.pt")
    mark_as_folder(path, "data/0")
    with pytest.raises(ValueError, match=r"the bytes that were written, got others in '.*/data/0'"):
        read_sharded_checkpoint(folder)


def test_a_file_that_is_removed_while_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = folder.glob("rank0-*.pt")
    stat = os.stat

    def found(file: Any, **arguments: Any) -> os.stat_result:
        result = stat(file, **arguments)
        if file == str(path):
            path.unlink()
        return result

    monkeypatch.setattr(os, "stat", found)
    with pytest.raises(ValueError, match=r"as index.pt says, got none\. Load another checkpoint"):
        read_sharded_checkpoint(folder)


def test_an_empty_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = "write_sharded_checkpoint: expected folder to name one, got an empty name."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        write_sharded_checkpoint({}, "", world_size=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["none/of", "file/below"])
def test_a_folder_that_cannot_be_made(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / name
    message = rf"write_sharded_checkpoint: could not make the folder {re.escape(str(folder))}: "
    with pytest.raises(OSError, match=rf"{message}No.*\. Name one in a folder that exists and may"):
        write_sharded_checkpoint({}, folder, world_size=1)


def test_the_current_folder_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    synced = []
    sync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    write_sharded_checkpoint({}, ".", world_size=1)
    assert synced.count(str(tmp_path)) == 2  # after each of the two files
