# SPDX-License-Identifier: BSD-3-Clause
"""All pieces of torch that we rely on although torch does not document them.

Each is listed once with what breaks without it, and tried on torch's own classes, so that a failure
with a new torch says what has changed. A piece that is used and not listed here fails a test too.
The compiler sees what the native code takes from torch's headers: that is listed without a trial.
"""

from __future__ import annotations

import ast
import inspect
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torch_pieces import Pieces
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import grad_scaler
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, placement_types
from torch.nn.modules import batchnorm
from torch.utils import _python_dispatch
from torch.utils.checkpoint import _CheckpointFrame, checkpoint

import torchfuse

ROOT = Path(__file__).resolve().parents[2]
PIECES = Pieces()
NATIVE_PIECES = Pieces()
COMPILED = {
    "at::_amp_foreach_non_finite_check_and_unscale_",
    "at::_foreach_norm",
    "at::_foreach_mul_",
    "at::_foreach_clamp_min_",
    "at::_foreach_clamp_max_",
    "at::_foreach_lerp_",
    "torch/csrc/Exceptions.h",
    "torch/csrc/autograd/autograd.h",
    "torch/csrc/autograd/autograd_not_implemented_fallback.h",
    "torch/csrc/autograd/custom_function.h",
    "torch/csrc/autograd/engine.h",
    "torch/csrc/autograd/function.h",
    "torch/csrc/autograd/function_hook.h",
    "torch/csrc/autograd/python_variable.h",
    "torch/csrc/autograd/variable.h",
    "torch/csrc/distributed/c10d/GroupRegistry.hpp",
    "torch/csrc/distributed/c10d/PrefixStore.hpp",
    "torch/csrc/distributed/c10d/ProcessGroup.hpp",
    "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp",
    "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
    "torch/csrc/distributed/c10d/Store.hpp",
    "torch/csrc/distributed/c10d/TCPStore.hpp",
    "torch/csrc/utils/pybind.h",
}


# --- Scalers and optimizers ----------------------------------------------------------------------


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


# --- Autograd and modules ------------------------------------------------------------------------


@PIECES.relies_on(
    "_python_dispatch.is_traceable_wrapper_subclass",
    breaks="DTensor and other wrappers, whose data pointer is 0, would reach the kernels",
)
def _wrappers_are_recognized() -> None:
    class Wrapper(torch.Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return [], None

        @staticmethod
        def __tensor_unflatten__(*arguments: Any) -> torch.Tensor:
            return torch.ones(1)

    recognizes = _python_dispatch.is_traceable_wrapper_subclass
    assert recognizes(torch.ones(1).as_subclass(Wrapper))
    assert not recognizes(torch.nn.Parameter(torch.ones(1)))


@PIECES.relies_on(
    "_C._current_graph_task_id",
    "_autograd._top_saved_tensors_default_hooks",
    "checkpoint._CheckpointFrame",
    breaks="activation checkpointing would exchange and observe batch statistics twice",
)
def _repeated_forward_passes_are_seen() -> None:
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    seen: list[tuple[bool, Any]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        closure = () if hooks is None else inspect.unwrap(hooks[0]).__closure__
        cells = [cell.cell_contents for cell in closure]
        seen.append((torch._C._current_graph_task_id() != -1, cells))
        return x.exp()

    x = torch.ones(1, requires_grad=True)
    checkpoint(region, x, use_reentrant=True).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [(False, []), (True, [])]
    seen.clear()
    checkpoint(region, x, use_reentrant=False).sum().backward()  # type: ignore[no-untyped-call]
    (first_inside, first), (repeated_inside, repeated) = seen
    assert (first_inside, repeated_inside) == (False, True)
    frames = [held for held in first if isinstance(held, _CheckpointFrame)]
    weakly = [held() for held in repeated if isinstance(held, weakref.ReferenceType)]
    assert len(frames) == len(weakly) == 1
    assert frames[0] is weakly[0]


@PIECES.relies_on(
    "_C._are_functorch_transforms_active",
    "forward_ad._current_level",
    breaks="SyncBatchNorm would fail in evaluation under torch.func and forward differentiation",
)
def _transforms_are_seen() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        level = forward_ad._current_level
        seen.append((torch._C._are_functorch_transforms_active(), level >= 0))
        return x

    x = torch.ones(2)
    look(x)
    torch.func.vmap(look)(x)
    with forward_ad.dual_level():
        look(x)
    look(x)
    assert seen == [(False, False), (True, False), (False, True), (False, False)]


@PIECES.relies_on(
    "_C._len_torch_dispatch_stack",
    breaks="amp_C would keep fake tensors as step counts, and later steps would do nothing",
)
def _modes_are_seen() -> None:
    assert torch._C._len_torch_dispatch_stack() == 0
    with FakeTensorMode():
        assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._len_torch_dispatch_stack() == 0


@PIECES.relies_on(
    "batchnorm._BatchNorm",
    "batchnorm._LazyNormBase",
    breaks="conversion would not find a model's batch normalization, or convert a lazy one",
)
def _classes_of_batch_norm() -> None:
    plain = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    for layer in (*plain, torch.nn.SyncBatchNorm):
        assert issubclass(layer, batchnorm._BatchNorm)
        assert not issubclass(layer, batchnorm._LazyNormBase)
    assert all(layer.forward is batchnorm._BatchNorm.forward for layer in plain)
    assert issubclass(torch.nn.LazyBatchNorm2d, batchnorm._LazyNormBase)
    assert not issubclass(torch.nn.InstanceNorm2d, batchnorm._BatchNorm)


@PIECES.relies_on(
    "Module._version",  # found by its name; it is that of tensors
    breaks="masters of apex.amp would not follow a model that is loaded between two steps",
)
def _versions_count_writes() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    versions = [param._version]
    with torch.no_grad():
        param.copy_(torch.zeros(2))
        versions.append(param._version)
        torch._foreach_copy_([param], [torch.ones(2)])
        versions.append(param._version)
    assert versions == sorted(set(versions))


@PIECES.relies_on(
    "Module._parameters",
    "Module._buffers",
    "Module._modules",
    "Module._non_persistent_buffers_set",
    breaks="conversion could not move parameters, buffers and layers as they are",
)
def _dictionaries_of_modules() -> None:
    layer = torch.nn.BatchNorm1d(2)
    assert layer._parameters == {"weight": layer.weight, "bias": layer.bias}
    assert set(layer._buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    layer.register_buffer("temporary", torch.ones(1), persistent=False)
    assert layer._non_persistent_buffers_set == {"temporary"}
    model = torch.nn.Sequential(layer)
    assert model._modules == {"0": layer}
    model._modules["0"] = torch.nn.Identity()
    assert isinstance(model[0], torch.nn.Identity)


@PIECES.relies_on(
    "Module._*hook*",
    breaks="conversion would lose the hooks of a layer",
)
def _hooks_of_modules() -> None:
    layer = torch.nn.Identity()
    before = {name for name in vars(layer) if "_hook" in name}
    layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    layer.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    layer.register_full_backward_hook(lambda *_: None)
    assert {name for name in before if vars(layer)[name]} == {
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_backward_hooks",
        "_is_full_backward_hook",
    }


# --- Native code ---------------------------------------------------------------------------------


@NATIVE_PIECES.relies_on(
    "DTensor._local_tensor",
    "DTensor._spec",
    breaks="the step could not reach the part of a sharded parameter that lies in this process, or "
    "compare how gradients are placed",
)
def _dtensors_hold_their_local_tensor() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
        assert torch.equal(sharded._local_tensor, torch.ones(2))
        assert sharded._spec.mesh == sharded.device_mesh == mesh
        assert sharded._spec.placements == sharded.placements == (Shard(0),)
        sharded._local_tensor.fill_(3.0)
        assert torch.equal(sharded.full_tensor(), torch.full((2,), 3.0))
    finally:
        dist.destroy_process_group()


@NATIVE_PIECES.relies_on(
    "_c10d_functional::all_reduce_",
    "_c10d_functional::wait_tensor",
    breaks="norms could not be summed over the processes that share a parameter",
)
def _functional_collectives() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = init_device_mesh("cpu", (1,)).get_group(0).group_name
        value = torch.ones(2, dtype=torch.float64)
        ops = torch.ops._c10d_functional
        pending = ops.all_reduce_(value, "sum", group)
        assert ops.wait_tensor(pending).data_ptr() == value.data_ptr()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", PIECES.names)
def test_piece(name: str) -> None:
    PIECES.check(name)


@pytest.mark.parametrize("name", NATIVE_PIECES.names)
def test_piece_of_the_native_code(name: str) -> None:
    NATIVE_PIECES.check(name)


# --- What is in use ------------------------------------------------------------------------------

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


def test_every_piece_in_use_is_listed_and_every_listed_piece_is_in_use() -> None:
    used: set[str] = set()
    for path in Path(torchfuse.__file__).parent.rglob("*.py"):
        used |= set(_private_pieces_of(path))
    assert used == set(PIECES.names)


def test_every_piece_in_native_use_is_listed_and_every_listed_piece_is_in_use() -> None:
    used: set[str] = set()
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"\b(?:at::_\w+|_c10d_functional::\w+)", text))
        used |= {f"DTensor.{name}" for name in re.findall(r'"(_local_tensor|_spec)"', text)}
        used |= set(re.findall(r"#include <(torch/csrc/(?!api/)[^>]*)>", text))
    assert used == {*NATIVE_PIECES.names, *COMPILED}
