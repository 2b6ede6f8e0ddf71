# SPDX-License-Identifier: BSD-3-Clause
"""Archives of every class that C++ has too: exact round trips."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    assert_same_state,
    shared_params,
    shared_steps,
    two_groups,
    used_tensors,
)

from torchfuse import _C
from torchfuse.convert import _archive, convert_checkpoint, read_cpp_archive, write_cpp_archive
from torchfuse.optimizers import FusedAdam, FusedOptimizer, FusedSGD
from torchfuse.testing import OPTIM_SPECS, OptimSpec

SPECS = [spec for spec in OPTIM_SPECS if spec.optimizer.__name__ in _C.optimizer_classes()]
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "fp16": (torch.float16, {}),
    "bf16-master": (torch.bfloat16, {"master_weights": True, "max_grad_norm": 2}),
}

every_class = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.optimizer.__name__)
every_mode = pytest.mark.parametrize("mode", MODES)


def trained(spec: OptimSpec, mode: str = "fp32", hyper: int = -1) -> FusedOptimizer:
    dtype, options = MODES[mode]
    optimizer = two_groups(spec, shared_params(dtype), hyper, **options)
    shared_steps(optimizer, 0, 3)
    return optimizer


@every_mode
@every_class
def test_round_trip_is_exact(spec: OptimSpec, mode: str, tmp_path: Path) -> None:
    for hyper in range(len(spec.grid)):
        expected = trained(spec, mode, hyper).state_dict()
        path = tmp_path / "optimizer.pt"
        write_cpp_archive(expected, path, spec.optimizer.__name__)
        actual = read_cpp_archive(path)
        assert_same_state(actual["state"], expected["state"])
        known = _C.OptimizerClass(spec.optimizer.__name__).default_options()
        names = _archive.to_python_names(known)
        for mine, theirs in zip(actual["param_groups"], expected["param_groups"], strict=True):
            assert mine == {key: theirs[key] for key in (*names, "params")}


@every_class
def test_the_class_is_found_from_the_options(spec: OptimSpec, tmp_path: Path) -> None:
    path, name = tmp_path / "optimizer.pt", spec.optimizer.__name__
    own, others = _C.OptimizerClass(name), map(_C.OptimizerClass, _C.optimizer_classes())
    alike = [
        other.name
        for other in others
        if set(other.default_options()) == set(own.default_options()) and other.states == own.states
    ]
    state_dict = trained(spec).state_dict()
    if alike == [name]:
        write_cpp_archive(state_dict, path)
        assert _C.read_archive(str(path))["format"] == own.archive_format
    else:
        with pytest.raises(ValueError, match=rf"one class in \[{', '.join(alike)}\].*Name the"):
            write_cpp_archive(state_dict, path)


@every_class
def test_a_converted_file_is_loaded_with_the_same_bits(spec: OptimSpec, tmp_path: Path) -> None:
    optimizer = trained(spec, "bf16-master")
    torch.save({**optimizer.state_dict()}, tmp_path / "a.pt")
    there = convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt", spec.optimizer.__name__)
    back = convert_checkpoint(tmp_path / "b.pt", tmp_path / "c.pt")
    assert (there.to_cpp, back.to_cpp) == (True, False)
    assert there.states == back.states == len(optimizer.state_dict()["state"])
    state_dict = torch.load(tmp_path / "c.pt", weights_only=True)
    assert_same_state(state_dict["state"], optimizer.state_dict()["state"])
    loaded = two_groups(spec, shared_params(torch.bfloat16), 0, set_grad_none=False)
    loaded.load_state_dict(state_dict)
    assert_same_state(loaded.state_dict()["state"], optimizer.state_dict()["state"])
    assert loaded.set_grad_none is False, "an option that C++ does not have stays the optimizer's"


STORAGE: dict[str, dict[str, Any]] = {
    "states": {
        "state_dtype": torch.float16,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.float32,
    },
    "remainders": {
        "master_weights": True,
        "store_param_remainders": True,
        "state_dtype": torch.bfloat16,
    },
    "stochastic": {"stochastic_rounding": True, "seed": 2**62 + 1},
    "averages": {"ema_decay": 0.75, "ema_warmup": True, "ema_start_step": 1},
}


@pytest.mark.parametrize("mode", STORAGE)
@every_class
def test_how_things_are_stored_is_kept(spec: OptimSpec, mode: str, tmp_path: Path) -> None:
    name = spec.optimizer.__name__
    known = _C.OptimizerClass(name).default_options()
    options = {key: value for key, value in STORAGE[mode].items() if key in known}
    params = shared_params(torch.bfloat16)
    optimizer = two_groups(spec, params, **options)
    shared_steps(optimizer, 0, 3)
    write_cpp_archive(optimizer.state_dict(), tmp_path / "optimizer.pt", name)
    read = read_cpp_archive(tmp_path / "optimizer.pt")
    assert_same_state(read["state"], optimizer.state_dict()["state"])
    assert options.items() <= read["param_groups"][1].items()
    others = copy.deepcopy(params)
    loaded = two_groups(spec, others, **options)
    loaded.load_state_dict(read)
    for owner in (optimizer, loaded):
        shared_steps(owner, 3, 5)
    states = [used_tensors(owner.state_dict()["state"]) for owner in (optimizer, loaded)]
    assert_same_state(states[1], states[0])
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@every_class
def test_tensors_are_on_the_cpu_in_the_file_and_go_back(
    spec: OptimSpec, tmp_path: Path, device: str
) -> None:
    def on_device() -> FusedOptimizer:
        params = [torch.nn.Parameter(param.detach().to(device)) for param in shared_params()]
        return two_groups(spec, params)

    optimizer, loaded = on_device(), on_device()
    grads = [torch.randn_like(p) for group in optimizer.param_groups for p in group["params"]]
    for owner in (optimizer, loaded):
        params = [param for group in owner.param_groups for param in group["params"]]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
    optimizer.step()
    write_cpp_archive(optimizer.state_dict(), tmp_path / "optimizer.pt", spec.optimizer.__name__)
    read = read_cpp_archive(tmp_path / "optimizer.pt")
    for saved in read["state"].values():
        assert {tensor.device.type for tensor in saved.values()} == {"cpu"}
    loaded.load_state_dict(read)
    assert_same_state(loaded.state_dict()["state"], optimizer.state_dict()["state"])
    state = loaded.state[loaded.param_groups[0]["params"][0]]
    assert all(tensor.device.type == device for tensor in state.values())


def test_a_fresh_optimizer(tmp_path: Path) -> None:
    state_dict = FusedAdam(shared_params()).state_dict()
    write_cpp_archive(state_dict, tmp_path / "optimizer.pt")
    loaded = read_cpp_archive(tmp_path / "optimizer.pt")
    assert loaded["state"] == {}
    assert loaded["param_groups"][0]["params"] == [0, 1, 2, 3, 4]


def test_torch_continues_from_a_cpp_archive(tmp_path: Path) -> None:
    optimizer = trained(OPTIM_SPECS[0])
    write_cpp_archive(optimizer.state_dict(), tmp_path / "optimizer.pt")
    params = shared_params()
    theirs = torch.optim.Adam([{"params": params[:2]}, {"params": params[2:]}])
    theirs.load_state_dict(read_cpp_archive(tmp_path / "optimizer.pt"))
    assert theirs.state[params[1]]["step"] == 3.0
    assert theirs.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"]


def test_tensor_hyper_parameters_become_their_numbers(tmp_path: Path) -> None:
    optimizer = trained(OPTIM_SPECS[0])
    numbers = [dict(group) for group in optimizer.state_dict()["param_groups"]]
    optimizer.make_capturable()
    write_cpp_archive(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = read_cpp_archive(tmp_path / "optimizer.pt")["param_groups"]
    for mine, theirs in zip(loaded, numbers, strict=True):
        assert mine == {key: theirs[key] for key in mine}


def test_layouts_are_kept_and_views_stay_small(tmp_path: Path) -> None:
    param = torch.nn.Parameter(
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    )
    param.grad = torch.randn_like(param)
    optimizer = FusedAdam([param])
    optimizer.step()
    state_dict = optimizer.state_dict()
    buffer = torch.zeros(100_000)
    buffer[:120] = state_dict["state"][0]["exp_avg"].as_strided((120,), (1,))
    view = buffer[:120].as_strided(param.shape, param.stride())
    state_dict["state"][0]["exp_avg"] = view
    write_cpp_archive(state_dict, tmp_path / "optimizer.pt")
    loaded = read_cpp_archive(tmp_path / "optimizer.pt")["state"]
    assert_same_state(loaded, optimizer.state_dict()["state"])
    assert loaded[0]["exp_avg_sq"].stride() == param.stride()
    assert (tmp_path / "optimizer.pt").stat().st_size < 20_000


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [
        (None, 0.0, None),
        ((0.0, 2.0), 0.0, 2.0),
        ((0.5, 2.0), 0.5, 2.0),
        ((0.5, math.inf), 0.5, None),
    ],
)
def test_bounds_are_one_option_in_python_and_two_in_cpp(
    bounds: tuple[float, float] | None, low: float, high: float | None
) -> None:
    python = {"lr": 0.1, "trust_ratio_bounds": bounds}
    cpp = {"lr": 0.1, "min_trust_ratio": low, "max_trust_ratio": high}
    assert _archive.to_cpp_names(python) == cpp
    assert _archive.to_python_names(cpp) == python


def test_states_that_have_not_begun(tmp_path: Path) -> None:
    """torch.optim.SGD writes them as None; in C++ they are zeros and the count is 0, or absent."""
    state_dict = copy.deepcopy(trained(OPTIM_SPECS[0]).state_dict())
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        for key in (0, 1):
            state_dict["state"][key][name] = None
    state_dict["state"][0]["master_param"] = torch.ones(37, 5)
    write_cpp_archive(state_dict, tmp_path / "optimizer.pt")
    loaded = read_cpp_archive(tmp_path / "optimizer.pt")["state"]
    assert set(loaded) == {0, 2, 3}
    assert float(loaded[0]["step"]) == 0.0
    assert torch.equal(loaded[0]["exp_avg"], torch.zeros(37, 5))
    del state_dict["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match=r"state\[0\] to hold 'exp_avg', got"):
        write_cpp_archive(state_dict, tmp_path / "optimizer.pt")


def test_a_later_momentum_buffer_keeps_the_count(tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = FusedSGD([p], lr=0.1, dampening=0.5, ema_decay=0.5)
    for step in range(5):
        optimizer.param_groups[0]["momentum"] = 0.9 if step > 2 else 0.0
        optimizer.found_inf = torch.tensor(float(step == 3))
        p.grad = torch.full_like(p, 1.0 + step)
        optimizer.step()
        if step < 3:
            continue
        write_cpp_archive(optimizer.state_dict(), tmp_path / "optimizer.pt")
        loaded = read_cpp_archive(tmp_path / "optimizer.pt")["state"][0]
        assert (float(loaded["step"]), float(loaded["momentum_start"])) == (step, 3.0)
        assert torch.equal(loaded["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
        assert torch.equal(loaded["ema_param"], optimizer.state[p]["ema_param"])


@pytest.mark.parametrize("exists", [True, False], ids=["file", "nothing"])
def test_a_link_stays_and_the_file_behind_it_is_replaced(exists: bool, tmp_path: Path) -> None:
    """As torch.save does it."""
    folder, links = tmp_path / "files", tmp_path / "links"
    folder.mkdir()
    links.mkdir()
    state_dict = trained(SPECS[0]).state_dict()
    for name in ("torch", "archive", "converted"):
        if exists:
            (folder / name).write_text("earlier", encoding="utf-8")
        (links / name).symlink_to(Path("..") / "files" / name)
    torch.save(state_dict, links / "torch")
    write_cpp_archive(state_dict, links / "archive")
    convert_checkpoint(links / "archive", links / "converted")
    for found in (folder, links):
        assert {path.name for path in found.iterdir()} == {"torch", "archive", "converted"}
    assert all(path.is_symlink() for path in links.iterdir())
    assert not any(path.is_symlink() for path in folder.iterdir())
    loaded = torch.load(folder / "converted", weights_only=True)
    assert_same_state(loaded["state"], state_dict["state"])
    if exists:
        with pytest.raises(ValueError, match="state dict"):
            write_cpp_archive({}, links / "archive")
        assert_same_state(read_cpp_archive(links / "archive")["state"], state_dict["state"])
