# SPDX-License-Identifier: BSD-3-Clause
"""All pieces of torch that our Python relies on although torch does not document them.

Each is listed once with what breaks without it, and tried on torch's own classes, so that a failure
with a new torch says what has changed. A piece that is used and not listed here fails a test too.
Those of autograd and modules are in test_torch_private_autograd.py, those of the native code in
test_torch_private_native.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_torch_private_autograd
import torch
from support.torch_pieces import Pieces
from torch.amp import grad_scaler
from torch.distributed.tensor import placement_types

import torchfuse

PIECES = Pieces()


class RecordingScaler(torch.amp.GradScaler):
    """Overrides what torchfuse.amp.GradScaler overrides, and notes the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__("cpu", init_scale=8.0)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self.calls.append(f"lazy_init on {dev}")
        super()._lazy_init_scale_growth_tracker(dev)

    def _unscale_grads_(self, *arguments: Any) -> dict[torch.device, torch.Tensor]:
        self.calls.append(f"unscale with {len(arguments)} arguments")
        return {torch.device("cpu"): torch.zeros(())}

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.calls.append("check_inf")
        return super()._check_inf_per_device(optimizer)


def scaled(scaler: torch.amp.GradScaler) -> torch.optim.Adam:
    """Backward through a scaled loss, with an optimizer that obeys a scaler inside its step."""
    param = torch.nn.Parameter(torch.ones(2))
    scaler.scale(param.sum()).backward()
    return torch.optim.Adam([param], fused=True)


@PIECES.relies_on(
    "GradScaler._scale",
    "GradScaler._growth_tracker",
    "GradScaler._init_scale",
    "GradScaler._init_growth_tracker",
    "GradScaler._lazy_init_scale_growth_tracker",
    breaks="our scaler puts its native tensors behind these names and fills them on first use",
)
def _scale_is_made_on_first_use() -> None:
    scaler = RecordingScaler()
    assert vars(scaler)["_scale"] is None
    assert vars(scaler)["_growth_tracker"] is None
    assert (scaler._init_scale, scaler._init_growth_tracker) == (8.0, 0)
    scaler.scale(torch.ones(()))
    assert scaler.calls == ["lazy_init on cpu"]
    assert (vars(scaler)["_scale"].item(), vars(scaler)["_growth_tracker"].item()) == (8.0, 0)
    loaded = RecordingScaler()
    loaded.load_state_dict({**scaler.state_dict(), "scale": 4.0, "_growth_tracker": 3})
    assert (loaded._init_scale, loaded._init_growth_tracker) == (4.0, 3)


@PIECES.relies_on(
    "GradScaler._device",
    "GradScaler._enabled",
    "GradScaler._growth_factor",
    "GradScaler._backoff_factor",
    "GradScaler._growth_interval",
    breaks="our scaler reads the constructor's values from these names",
)
def _constructor_values() -> None:
    scaler = torch.amp.GradScaler("cpu", 8.0, 3.0, 0.25, 7)
    assert (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval) == (
        3.0,
        0.25,
        7,
    )
    assert (scaler._device, scaler._enabled) == ("cpu", True)
    assert not torch.amp.GradScaler("cpu", enabled=False)._enabled


@PIECES.relies_on(
    "GradScaler._check_scale_growth_tracker",
    breaks="our scaler's errors before the first scale() are torch's",
)
def _scale_is_checked() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(AssertionError, match="somewhere"):
        scaler._check_scale_growth_tracker("somewhere")
    scaler.scale(torch.ones(()))
    scale, tracker = scaler._check_scale_growth_tracker("somewhere")
    assert (scale.item(), tracker.item()) == (8.0, 0)


@PIECES.relies_on(
    "GradScaler._per_optimizer_states",
    "grad_scaler._refresh_per_optimizer_state",
    "grad_scaler.OptState",
    breaks="our scaler keeps the stage and the overflow flags of each optimizer there",
)
def _states_of_optimizers() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = scaled(scaler)
    fresh = {"stage": grad_scaler.OptState.READY, "found_inf_per_device": {}}
    assert grad_scaler._refresh_per_optimizer_state() == fresh
    assert scaler._per_optimizer_states[id(optimizer)] == fresh
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"] is grad_scaler.OptState.UNSCALED
    assert {k: v.item() for k, v in state["found_inf_per_device"].items()} == {
        torch.device("cpu"): 0.0
    }
    scaler.step(optimizer)
    assert state["stage"] is grad_scaler.OptState.STEPPED


@PIECES.relies_on(
    "GradScaler._unscale_grads_",
    breaks="unscale_() of our scaler would not reach the native kernel",
)
def _unscaling_is_one_method() -> None:
    scaler = RecordingScaler()
    optimizer = scaled(scaler)
    scaler.unscale_(optimizer)
    assert scaler.calls[1:] == ["unscale with 4 arguments"]
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [8.0, 8.0]


@PIECES.relies_on(
    "GradScaler._check_inf_per_device",
    "_step_supports_amp_scaling",
    breaks="torch's scaler would unscale and skip outside of our fused step",
)
def _fused_optimizers_are_told() -> None:
    scaler = RecordingScaler()
    optimizer = scaled(scaler)
    told: list[tuple[float, float]] = []
    original = optimizer.step

    def step() -> None:
        told.append((optimizer.grad_scale.item(), optimizer.found_inf.item()))
        original()

    optimizer.step = step  # type: ignore[method-assign, assignment]
    assert optimizer._step_supports_amp_scaling
    scaler.step(optimizer)
    assert "check_inf" in scaler.calls
    assert told == [(8.0, 0.0)]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@PIECES.relies_on(
    "Optimizer._patch_step_function",
    "hooked",
    breaks="our step would be traced by torch.compile, or wrapped twice, running hooks twice",
)
def _step_is_wrapped_once() -> None:
    calls: list[str] = []

    class Optimizer(torch.optim.SGD):
        def _patch_step_function(self) -> None:
            calls.append("patched")
            super()._patch_step_function()

    params = [torch.nn.Parameter(torch.ones(1))]
    Optimizer(params)
    wrapped = Optimizer.step
    assert wrapped.hooked  # type: ignore[attr-defined]
    Optimizer(params)
    assert Optimizer.step is wrapped
    assert calls == ["patched", "patched"]


@PIECES.relies_on(
    "Optimizer._optimizer_load_state_dict_pre_hooks",
    "Optimizer._optimizer_load_state_dict_post_hooks",
    "Optimizer._optimizer_state_dict_pre_hooks",
    "Optimizer._optimizer_state_dict_post_hooks",
    breaks="hooks that users register on state_dict() and load_state_dict() would not run",
)
def _hooks_are_kept() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    def pre_hook(*arguments: Any) -> None: ...

    def post_hook(*arguments: Any) -> None: ...

    optimizer.register_load_state_dict_pre_hook(pre_hook)
    optimizer.register_load_state_dict_post_hook(post_hook)
    assert list(optimizer._optimizer_load_state_dict_pre_hooks.values()) == [pre_hook]
    assert list(optimizer._optimizer_load_state_dict_post_hooks.values()) == [post_hook]
    optimizer.register_state_dict_pre_hook(pre_hook)
    optimizer.register_state_dict_post_hook(post_hook)
    assert list(optimizer._optimizer_state_dict_pre_hooks.values()) == [pre_hook]
    assert list(optimizer._optimizer_state_dict_post_hooks.values()) == [post_hook]


@pytest.mark.parametrize("name", PIECES.names)
def test_piece(name: str) -> None:
    PIECES.check(name)


# Names that a subclass or a scaler shares with torch by convention, wherever they are spelled.
_OWNERS: dict[str, Any] = {
    "GradScaler": torch.amp.GradScaler("cpu"),
    "Optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    "Module": torch.nn.Module(),
}
_CONVENTIONS = {"_step_supports_amp_scaling", "hooked"}


def _private_pieces_of(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if '"_hook" in name' in text:
        yield "Module._*hook*"
    # The last two of torch._C._autograd._name.
    for chain in re.findall(r"\btorch\.((?:_\w+\.)+_\w+)", text):
        yield ".".join(chain.split(".")[-2:])
    yield from re.findall(r"\b(?:forward_ad|ZeroRedundancyOptimizer)\._\w+", text)
    spelled = {ast.Attribute: "attr", ast.Name: "id", ast.FunctionDef: "name"}
    nodes = [node for node in ast.walk(tree) if type(node) in spelled]
    names = {getattr(node, spelled[type(node)]) for node in nodes}
    yield from names & _CONVENTIONS
    for owner, example in _OWNERS.items():
        private = {name for name in names if re.match("_[^_]", name) and hasattr(example, name)}
        yield from (f"{owner}.{name}" for name in private)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            module = str(node.module).rpartition(".")[2]
            for alias in node.names:
                if module.startswith("_") or alias.name.startswith("_") or alias.name == "OptState":
                    yield f"{module}.{alias.name}"


@PIECES.relies_on(
    "ZeroRedundancyOptimizer._init_local_optimizer",
    breaks="averages of one rank's parameters would not be refused",
)
def _a_local_optimizer_is_made_by_a_function_with_code() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    assert ZeroRedundancyOptimizer._init_local_optimizer.__code__.co_filename


@PIECES.relies_on(
    "placement_types._StridedShard",
    breaks="parts of FSDP over tensor parallelism would be rounded by other elements' random bits",
)
def _a_strided_placement_says_its_dimension_and_pieces() -> None:
    strided = placement_types._StridedShard(1, split_factor=3)
    assert (strided.dim, strided.split_factor) == (1, 3)
    assert not strided.is_replicate()


def test_every_piece_in_use_is_listed_and_every_listed_piece_is_in_use() -> None:
    used: set[str] = set()
    for path in Path(torchfuse.__file__).parent.rglob("*.py"):
        used |= set(_private_pieces_of(path))
    assert used == {*PIECES.names, *test_torch_private_autograd.PIECES.names}
