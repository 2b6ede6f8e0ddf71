# SPDX-License-Identifier: BSD-3-Clause
"""State dicts and archives that are refused: by a message that names the entry, without a trace."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import shared_params, shared_steps, two_groups

from torchfuse import _C
from torchfuse.convert import convert_checkpoint, read_cpp_archive, write_cpp_archive
from torchfuse.testing import OPTIM_SPECS


def adam_state() -> dict[str, Any]:
    optimizer = two_groups(OPTIM_SPECS[0], shared_params())
    shared_steps(optimizer, 0, 3)
    state_dict: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    return state_dict


# --- State dicts that are refused -----------------------------------------------------------------


def _unknown_state(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["momentum"] = torch.zeros(1)


def _missing_state(state_dict: dict[str, Any]) -> None:
    del state_dict["state"][2]["exp_avg_sq"]


def _missing_step(state_dict: dict[str, Any]) -> None:
    del state_dict["state"][2]["step"]


def _two_steps(state_dict: dict[str, Any]) -> None:
    state_dict["state"][0]["step"] = torch.ones(2)


def _negative_step(state_dict: dict[str, Any]) -> None:
    state_dict["state"][0]["step"] = -1


def _no_number(state_dict: dict[str, Any]) -> None:
    state_dict["state"][0]["step"] = torch.tensor(math.nan)


def _not_a_tensor(state_dict: dict[str, Any]) -> None:
    state_dict["state"][0]["exp_avg"] = [1.0]


def _stray_state(state_dict: dict[str, Any]) -> None:
    state_dict["state"][9] = state_dict["state"].pop(0)


def _bad_rate(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][1]["lr"] = -1.0


def _rate_of_another_type(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][1]["lr"] = torch.float32


def _three_betas(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["betas"] = (0.9, 0.99, 0.999)


def _no_params(state_dict: dict[str, Any]) -> None:
    del state_dict["param_groups"][1]["params"]


def _no_groups(state_dict: dict[str, Any]) -> None:
    del state_dict["param_groups"]


def _groups_of_another_type(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"] = state_dict["param_groups"][0]


def _state_of_no_tensors(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1] = 1


def _missing_option(state_dict: dict[str, Any]) -> None:
    del state_dict["param_groups"][1]["bias_correction"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_unknown_state, r"state\[1\] to hold states of FusedAdam, .*got 'momentum'"),
        (_missing_state, r"state\[2\] to hold 'exp_avg_sq', got \[exp_avg,"),
        (_missing_step, r"state\[2\] to hold 'step'"),
        (_two_steps, r"state\[0\] to hold 'step' as a number or a 1-element tensor"),
        (_negative_step, r"state\[0\] to hold 'step' as a whole number of at least 0, .* got -1\."),
        (_no_number, r"state\[0\] to hold 'step' as a whole number of at least 0, .* got nan\."),
        (_not_a_tensor, r"state\[0\] to hold 'exp_avg' as a tensor, got list"),
        (_stray_state, r"state to belong to parameters, got \[9\] too"),
        (
            _bad_rate,
            r"expected param_groups\[1\].lr to be at least 0 and finite, got -1",
        ),
        (
            _rate_of_another_type,
            r"FusedAdamOptions: expected the archive's lr to be a floating-point",
        ),
        (_three_betas, r"param_groups\[0\]\['betas'\] to hold 2 values, got 3"),
        (_no_params, r"param_groups\[1\] to hold a list 'params'"),
        (
            _groups_of_another_type,
            r"a list 'param_groups' and a dict 'state', got dict and dict",
        ),
        (_state_of_no_tensors, r"state\[1\] to be a state, got int"),
        (_no_groups, r"with 'state' and 'param_groups', got \[state\]"),
        (
            _missing_option,
            r"param_groups\[1\] to hold 'bias_correction', got .*Load the checkpoint",
        ),
    ],
)
def test_a_state_dict_that_cpp_would_refuse_writes_nothing(
    damage: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    state_dict = adam_state()
    damage(state_dict)
    target = tmp_path / "optimizer.pt"
    target.write_text("earlier", encoding="utf-8")
    with pytest.raises((ValueError, TypeError), match=message):
        write_cpp_archive(state_dict, target, "FusedAdam")
    assert target.read_text(encoding="utf-8") == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer.pt"]


def test_other_state_dicts_and_classes(tmp_path: Path) -> None:
    params = shared_params()
    theirs = torch.optim.SGD(params).state_dict()
    with pytest.raises(ValueError, match=r"of one class in .*FusedAdam.*Load the checkpoint into"):
        write_cpp_archive(theirs, tmp_path / "optimizer.pt")
    with pytest.raises(
        ValueError, match=r"expected optimizer to be in \[.*FusedAdam, .*got 'Adam'"
    ):
        write_cpp_archive(adam_state(), tmp_path / "optimizer.pt", "Adam")
    with pytest.raises(ValueError, match=r"state dict, with .* got \[0.weight\]"):
        write_cpp_archive({"0.weight": params[0]}, tmp_path / "optimizer.pt")
    assert list(tmp_path.iterdir()) == []


# --- Archives that are refused --------------------------------------------------------------------


def _later_format(archive: dict[str, Any]) -> None:
    archive["format"] = "torchfuse.optim.FusedAdam.99"


def _nested_format(archive: dict[str, Any]) -> None:
    archive["format"] = {"version": 1}


def _no_format(archive: dict[str, Any]) -> None:
    del archive["format"]


def _fewer_groups(archive: dict[str, Any]) -> None:
    archive["group_count"] = 3


def _count_of_another_type(archive: dict[str, Any]) -> None:
    archive["group/1"]["param_count"] = 1.5


def _negative_group_count(archive: dict[str, Any]) -> None:
    archive["group_count"] = -1


def _too_few_groups(archive: dict[str, Any]) -> None:
    archive["group_count"] = 1


def _negative_param_count(archive: dict[str, Any]) -> None:
    archive["group/1"]["param_count"] = -3


def _huge_param_count(archive: dict[str, Any]) -> None:
    archive["group/1"]["param_count"] = 2**62


def _too_few_params(archive: dict[str, Any]) -> None:
    archive["group/1"]["param_count"] = 1


def _no_option(archive: dict[str, Any]) -> None:
    del archive["group/1"]["options"]["eps"]


def _bad_beta(archive: dict[str, Any]) -> None:
    archive["group/0"]["options"]["betas"] = (0.9, 1.0)


def _no_moment(archive: dict[str, Any]) -> None:
    del archive["group/1"]["state/0"]["exp_avg"]


def _part_of_a_step(archive: dict[str, Any]) -> None:
    archive["group/1"]["state/0"]["step"] = torch.tensor(0.5)


def _strange_state(archive: dict[str, Any]) -> None:
    archive["group/1"]["state/0"]["exp_max"] = torch.zeros(1)


def _state_of_another_type(archive: dict[str, Any]) -> None:
    archive["group/1"]["state/0"] = 1.0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_later_format, r"of a format in \[.*optim.FusedAdam.1, .*FusedAdam.99'"),
        (_nested_format, r"of a format in .*, got \{'version': 1\}"),
        (_no_format, r"of an optimizer of torchfuse, got one that holds .*group_count"),
        (_fewer_groups, r"hold group/2, of type dict, got \[format"),
        (_count_of_another_type, r"in group/1 to hold param_count, of type int, got float"),
        (_negative_group_count, r"to hold a group_count from 0 to 1000000, got -1\."),
        (_too_few_groups, r"to hold nothing behind its group_count of 1, got group/1\."),
        (_negative_param_count, r"in group/1 to hold a param_count from 0 to 1000000, got -3\."),
        (_huge_param_count, r"in group/1 to hold a param_count from 0 to 1000000, got 4611"),
        (_too_few_params, r"in group/1 to hold nothing behind its param_count of 1, got state/1\."),
        (_no_option, r"of FusedAdam in group/1, got: .* expected the archive to hold eps"),
        (
            _bad_beta,
            r"in group/0, got: .*options.betas\[1\] to be at least 0 and less than 1",
        ),
        (_no_moment, r"in group/1/state/0 to hold 'exp_avg', got \[exp_avg_sq"),
        (_part_of_a_step, r"in group/1/state/0 to hold 'step' as a whole number .* got 0.5\."),
        (_strange_state, r"in group/1/state/0 to hold states of FusedAdam, .* got 'exp_max'"),
        (_state_of_another_type, r"in group/1/state/0 to be a state, got float"),
    ],
)
def test_a_damaged_archive_is_refused(
    damage: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "optimizer.pt"
    write_cpp_archive(adam_state(), path)
    archive = _C.read_archive(str(path))
    damage(archive)
    _C.write_archive(archive, str(path))
    with pytest.raises(ValueError, match=message) as raised:
        convert_checkpoint(path, tmp_path / "python.pt")
    assert str(path) in str(raised.value)
    assert [file.name for file in tmp_path.iterdir()] == ["optimizer.pt"]


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_archive_is_refused(part: float, tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    write_cpp_archive(adam_state(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(ValueError, match=r"optimizer.pt to be a C\+\+ archive, .* got a truncated"):
        read_cpp_archive(path)
    with pytest.raises(ValueError, match=r"archive, .* or a Python file, .*: truncated, of"):
        convert_checkpoint(path, tmp_path / "python.pt")
    assert [file.name for file in tmp_path.iterdir()] == ["optimizer.pt"]


def test_flipped_bytes_are_refused(tmp_path: Path) -> None:
    """The container checks its records."""
    path = tmp_path / "optimizer.pt"
    write_cpp_archive(adam_state(), path)
    damaged = bytearray(path.read_bytes())
    where = damaged.index(b"exp_avg")
    damaged[where : where + 7] = b"\xff" * 7
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"optimizer.pt to be a C\+\+ archive.*does not read"):
        read_cpp_archive(path)


def test_a_scripted_module_is_no_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    _C.write_archive({"weight": torch.ones(2), "training": True}, str(path))
    with pytest.raises(ValueError, match=r"model.pt to be the archive of an optimizer .*weight"):
        read_cpp_archive(path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        read_cpp_archive(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_cpp_archive(adam_state(), tmp_path / "nowhere" / "optimizer.pt")
