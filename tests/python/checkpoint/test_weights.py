# SPDX-License-Identifier: BSD-3-Clause
"""Weights in safetensors files: Python, C++ and the format's own library read each other's."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.cpp_programs import cpp_program
from torch import nn

import torchfuse


class Tied(nn.Module):
    """The output layer has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_what_python_writes_the_library_reads_and_the_other_way(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    torchfuse.save_weights(tmp_path / "w", model, {"epoch": "3"})
    assert os.listdir(tmp_path) == ["w"]
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "w"))
    assert equal(model, other)
    model = Tied()
    # It leaves names of shared tensors out, and says so in the metadata.
    safetensors.torch.save_model(model, str(tmp_path / "w"), {"epoch": "4"})
    assert len(safetensors.torch.load_file(tmp_path / "w")) < len(model.state_dict())
    assert torchfuse.load_weights(tmp_path / "w", other)["epoch"] == "4"
    assert equal(model, other)


@pytest.mark.processes
def test_cpp_reads_and_writes_the_same_files(tmp_path: Path) -> None:
    model = Tied()
    torchfuse.save_weights(tmp_path / "python", model, {'a"b': "\n\u00e9\U0001f600"})
    safetensors.torch.save_model(model, str(tmp_path / "library"))
    for name in ("python", "library"):
        command = cpp_program("weights", tmp_path / name, tmp_path / f"{name}-cpp")
        subprocess.run(command, check=True, timeout=240)
        other = Tied()
        metadata = torchfuse.load_weights(tmp_path / f"{name}-cpp", other)
        assert equal(model, other)
        assert metadata["format"] == "pt"
    # Both languages order tensors and metadata alike: the files have the same tensors at the end.
    with safetensors.safe_open(tmp_path / "python-cpp", framework="pt") as file:
        assert file.metadata()['a"b'] == "\n\u00e9\U0001f600"
    assert safetensors.torch.load_file(tmp_path / "python-cpp").keys() == model.state_dict().keys()


def test_dtypes_and_layouts(tmp_path: Path) -> None:
    model = nn.Module()
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool):
        value = torch.arange(6).view(2, 3).t().to(dtype)
        model.register_buffer(f"of_{str(dtype)[6:]}", value)
    model.register_buffer("expanded", torch.ones(1).expand(3))
    torchfuse.save_weights(tmp_path / "w", model)
    for name, value in model.state_dict().items():
        loaded = safetensors.torch.load_file(tmp_path / "w")[name]
        assert loaded.dtype == value.dtype
        assert torch.equal(loaded, value)
    linear = nn.Linear(2, 3)
    torchfuse.save_weights(tmp_path / "w", linear)
    wide = nn.Linear(2, 3).double()
    torchfuse.load_weights(tmp_path / "w", wide)
    assert torch.equal(wide.weight, linear.weight.double())


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w"
    model = nn.Linear(2, 3)
    torchfuse.save_weights(path, model)
    whole = path.read_bytes()
    wider = nn.Linear(2, 4)
    before = wider.weight.clone()
    with pytest.raises(ValueError, match=r"load_weights: expected .*/w\['weight'\] to have the sh"):
        torchfuse.load_weights(path, wider)
    with pytest.raises(ValueError, match="got 'bias' too"):
        torchfuse.load_weights(path, nn.Sequential())
    for kept in (0, 7, 20, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match="to be a whole safetensors file"):
            torchfuse.load_weights(path, wider)
    with pytest.raises(ValueError, match="to be a file, got a folder, pipe or device"):
        torchfuse.load_weights(tmp_path, wider)
    with pytest.raises(FileNotFoundError):
        torchfuse.load_weights(tmp_path / "none", wider)
    assert torch.equal(wider.weight, before)


def test_only_names_of_one_tensor_may_be_left_out(tmp_path: Path) -> None:
    path = str(tmp_path / "w")
    # As other writers do it, without a word in the metadata.
    safetensors.torch.save_file({"a": torch.ones(2)}, path, {"b": "a"})
    tied, apart = nn.Module(), nn.Module()
    tied.a = apart.a = nn.Parameter(torch.zeros(2))
    tied.b = tied.a
    apart.b = nn.Parameter(torch.zeros(2))
    torchfuse.load_weights(path, tied)
    assert tied.b.tolist() == [1, 1]
    with torch.no_grad():
        tied.a.zero_()
    with pytest.raises(ValueError, match="to hold 'b', got"):
        torchfuse.load_weights(path, apart)
    assert apart.a.tolist() == [0, 0]


def test_the_models_own_loading_decides_and_is_taken_back(tmp_path: Path) -> None:
    def check(model: Any, _: Any) -> None:
        if bool((model.bias < 0).any()):
            raise ValueError("below zero")

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    nn.init.constant_(model.bias, -1)
    before = other.weight.clone()
    torchfuse.save_weights(tmp_path / "w", model)
    other.register_load_state_dict_post_hook(check)
    nn.init.zeros_(other.bias)
    with pytest.raises(ValueError, match="/w does not fit: below zero"):
        torchfuse.load_weights(tmp_path / "w", other)
    assert torch.equal(other.weight, before)


def test_a_file_that_is_replaced_meanwhile_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """One open file is read: a name may stand for another file at any moment."""
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    torchfuse.save_weights(tmp_path / "one", one)
    torchfuse.save_weights(tmp_path / "two", two)
    real, opened = builtins.open, []

    def replace_after(file: Any, *arguments: Any, **keywords: Any) -> Any:
        result = real(file, *arguments, **keywords)
        if file == tmp_path / "one":
            opened.append(file)
            (tmp_path / "two").rename(tmp_path / "one")
        return result

    other = nn.Linear(2, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", replace_after)
        torchfuse.load_weights(tmp_path / "one", other)
    assert len(opened) == 1
    assert equal(other, one)


class Noted(nn.Module):
    """Keeps something else than tensors in its state."""

    def get_extra_state(self) -> Any:
        return "text"

    def set_extra_state(self, state: Any) -> None:
        pass


def with_metadata() -> nn.Module:
    module = nn.Module()
    module.register_buffer("__metadata__", torch.ones(1))
    return module


@pytest.mark.parametrize(
    ("make", "metadata", "message"),
    [
        (Noted, None, "expected '_extra_state' to be a tensor, got str"),
        (
            lambda: nn.Linear(2, 3, device="meta"),
            None,
            "expected 'weight' to have values, got a tensor on",
        ),
        (with_metadata, None, "expected '__metadata__' to have another name"),
        (
            lambda: nn.Linear(2, 3, dtype=torch.complex128),
            None,
            r"expected 'weight' to have a dtype .*complex128",
        ),
        (lambda: nn.Linear(2, 3), {"epoch": 3}, "expected metadata to have strings as keys"),
    ],
    ids=range(5),
)
def test_what_the_format_cannot_hold_is_refused_by_name(
    tmp_path: Path, make: Any, metadata: Any, message: str
) -> None:
    path = tmp_path / "w"
    torchfuse.save_weights(path, nn.Linear(2, 3))
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        torchfuse.save_weights(path, make(), metadata)
    with pytest.raises(OSError, match=r"save_weights: could not write .*: No such file"):
        torchfuse.save_weights(tmp_path / "none/w", nn.Linear(2, 3))
    assert path.read_bytes() == whole


def test_without_the_library_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="Run: pip install safetensors"):
        torchfuse.save_weights(tmp_path / "w", nn.Linear(2, 3))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("call", [torchfuse.save_weights, torchfuse.load_weights])
def test_arguments_in_another_order_or_of_another_kind(tmp_path: Path, call: Any) -> None:
    model, path = nn.Linear(2, 1), tmp_path / "w.safetensors"
    name = call.__name__
    with pytest.raises(TypeError, match=f"{name}: expected path to be .*, got Linear. Pass path"):
        call(model, path)
    with pytest.raises(TypeError, match=f"{name}: expected model to be a module, got OrderedDi"):
        call(path, model.state_dict())
    if call is torchfuse.save_weights:
        with pytest.raises(TypeError, match="metadata to be a dict of texts, got 'epoch 3'"):
            call(path, model, "epoch 3")
        return
    torchfuse.save_checkpoint(path, model=model)
    with pytest.raises(ValueError, match="Read files of save_checkpoint with load_checkpoint"):
        call(path, model)


def test_compiled_modules_have_the_names_of_the_module(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    torchfuse.save_weights(tmp_path / "w.safetensors", torch.compile(model))
    torchfuse.load_weights(tmp_path / "w.safetensors", other)
    assert torch.equal(other.weight, model.weight)
