# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torchfuse convert`: what it prints, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import shared_params, shared_steps

from torchfuse import __main__ as command_line
from torchfuse import _loader, load_checkpoint, save_checkpoint
from torchfuse.convert import read_cpp_archive
from torchfuse.optimizers import FusedAdam


@pytest.fixture
def python_file(tmp_path: Path) -> Path:
    optimizer = FusedAdam(shared_params(), lr=0.5)
    shared_steps(optimizer, 0, 1)
    optimizer.param_groups[0]["initial_lr"] = 0.25
    torch.save(optimizer.state_dict(), tmp_path / "python.pt")
    return tmp_path / "python.pt"


def expect_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails, says why in one line, and writes nothing."""
    assert command_line.main(["convert", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not Path("out.pt").exists()


def test_both_directions(
    python_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpp, back = tmp_path / "cpp.pt", tmp_path / "back.pt"
    assert command_line.main(["convert", str(python_file), str(cpp)]) == 0
    assert capsys.readouterr().out == (
        "FusedAdam from Python to C++: 1 parameter groups, 5 parameters, 4 of them with state; "
        "left out: initial_lr, set_grad_none\n"
    )
    assert command_line.main(["convert", str(cpp), str(back)]) == 0
    assert capsys.readouterr().out == (
        "FusedAdam from C++ to Python: 1 parameter groups, 5 parameters, 4 of them with state\n"
    )
    loaded = torch.load(back, weights_only=True)
    assert loaded["param_groups"] == read_cpp_archive(cpp)["param_groups"]
    assert loaded["param_groups"][0]["lr"] == 0.5


def test_the_class_can_be_named(python_file: Path, tmp_path: Path) -> None:
    cpp = str(tmp_path / "cpp.pt")
    assert command_line.main(["convert", str(python_file), cpp, "--optimizer", "FusedAdam"]) == 0
    assert read_cpp_archive(cpp)["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.pt", "out.pt"], "No such file or directory: 'none.pt'"),
        (["text.pt", "out.pt"], "expected text.pt to be a C++ archive, written by torch::save"),
        (["model.pt", "out.pt"], "expected model.pt to be an optimizer's state dict"),
        (["python.pt", "./python.pt"], "expected source and target to be two files"),
        (["python.pt", "out.pt", "--optimizer", "Adam"], "expected optimizer to be in [FusedAda"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    python_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(python_file.parent)
    Path("text.pt").write_text("no checkpoint", encoding="utf-8")
    torch.save({"weight": torch.ones(1)}, "model.pt")
    before = python_file.read_bytes()
    expect_one_line(arguments, message, capsys)
    assert python_file.read_bytes() == before


def test_folders_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = FusedAdam(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    one, folder, again = (str(tmp_path / name) for name in ("one.pt", "folder", "again.pt"))
    save_checkpoint(one, model=model, optimizer=optimizer, values={"epoch": 3})
    assert command_line.main(["convert", one, folder, "--world-size", "3"]) == 0
    expected = "model, optimizer, epoch from a file to a folder for 3 ranks\n"
    assert capsys.readouterr().out == expected
    assert len(list(Path(folder).iterdir())) == 4
    assert command_line.main(["convert", folder, again]) == 0
    assert capsys.readouterr().out == "model, optimizer, epoch from a folder to a file\n"
    loaded = FusedAdam(torch.nn.Linear(3, 2).parameters())
    assert load_checkpoint(again, optimizer=loaded)["epoch"] == 3
    for left, right in zip(optimizer.state.values(), loaded.state.values(), strict=True):
        assert torch.equal(left["exp_avg"], right["exp_avg"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["folder", "out.pt"], r"expected folder/index.pt to be a file, got none"),
        (["folder", "out.pt", "--world-size", "2"], "expected no world_size for the folder folder"),
        (["folder", "out.pt", "--optimizer", "FusedAdam"], "expected no optimizer for a folder"),
        (["python.pt", "out.pt", "--world-size", "2"], "to be a file of save_checkpoint, got"),
        (["none.pt", "out.pt", "--world-size", "2"], "convert_sharded_checkpoint: could not read"),
        (["one.pt", "out.pt", "--world-size", "0"], "expected world_size to be at least 1, got 0"),
    ],
)
def test_errors_of_folders_are_one_line(
    arguments: list[str],
    message: str,
    python_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(python_file.parent)
    Path("folder").mkdir()
    save_checkpoint("one.pt", model=torch.nn.Linear(3, 2))
    expect_one_line(arguments, message, capsys)


def test_a_class_is_not_named_for_an_archive(
    python_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpp = str(tmp_path / "cpp.pt")
    command_line.main(["convert", str(python_file), cpp])
    again = ["convert", cpp, str(tmp_path / "back.pt"), "--optimizer", "FusedAdam"]
    assert command_line.main(again) == 1
    assert "expected no optimizer for the C++ archive" in capsys.readouterr().err


def test_an_arbitrary_pickle_is_not_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state": {}, "param_groups": [print]}, tmp_path / "bad.pt")
    assert command_line.main(["convert", str(tmp_path / "bad.pt"), str(tmp_path / "o.pt")]) == 1
    message = capsys.readouterr().err
    assert "bad.pt to be a C++ archive" in message
    assert "of another kind, or with objects in it" in message


def test_without_the_native_library_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ImportError("torchfuse: expected torch 2.99")

    monkeypatch.setattr(_loader, "load", fail)
    assert command_line.main(["convert", "a.pt", "b.pt"]) == 1
    assert capsys.readouterr().err == "error: torchfuse: expected torch 2.99\n"


@pytest.mark.parametrize("arguments", [[], ["--env", "convert", "a", "b"], ["convert", "a"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command_line.main(arguments)
    assert raised.value.code == 2
    assert "usage: python -m torchfuse" in capsys.readouterr().err
