# SPDX-License-Identifier: BSD-3-Clause
"""All pieces of torch that we rely on although torch does not document them.

Each is listed once, with what breaks without it; how we use it is tested where we do. A piece that
is used and not listed fails a test. The compiler sees what the native code takes from torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp import grad_scaler
from torch.autograd import forward_ad
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import placement_types
from torch.nn.modules import batchnorm
from torch.utils import _python_dispatch

import torchfuse

ROOT = Path(__file__).resolve().parents[2]
#: What breaks when torch changes these.
PIECES = {
    "our scaler puts its native tensors behind these names and fills them on first use": (
        "GradScaler._scale",
        "GradScaler._growth_tracker",
        "GradScaler._init_scale",
        "GradScaler._init_growth_tracker",
        "GradScaler._lazy_init_scale_growth_tracker",
    ),
    "our scaler reads the constructor's values from these names": (
        "GradScaler._device",
        "GradScaler._enabled",
        "GradScaler._growth_factor",
        "GradScaler._backoff_factor",
        "GradScaler._growth_interval",
    ),
    "our scaler's errors before the first scale() are torch's": (
        "GradScaler._check_scale_growth_tracker",
    ),
    "our scaler keeps the stage and the overflow flags of each optimizer there": (
        "GradScaler._per_optimizer_states",
        "grad_scaler._refresh_per_optimizer_state",
        "grad_scaler.OptState",
    ),
    "unscale_() of our scaler would not reach the native kernel": ("GradScaler._unscale_grads_",),
    "torch's scaler would unscale and skip outside of our fused step": (
        "GradScaler._check_inf_per_device",
        "_step_supports_amp_scaling",
    ),
    "our step would be traced by torch.compile, or wrapped twice, running hooks twice": (
        "Optimizer._patch_step_function",
        "hooked",
    ),
    "hooks that users register on state_dict() and load_state_dict() would not run": (
        "Optimizer._optimizer_load_state_dict_pre_hooks",
        "Optimizer._optimizer_load_state_dict_post_hooks",
        "Optimizer._optimizer_state_dict_pre_hooks",
        "Optimizer._optimizer_state_dict_post_hooks",
    ),
    "averages of one rank's parameters would not be refused": (
        "ZeroRedundancyOptimizer._init_local_optimizer",
    ),
    "parts of FSDP over tensor parallelism would be rounded by other elements' random bits": (
        "placement_types._StridedShard",
    ),
    "DTensor and other wrappers, whose data pointer is 0, would reach the kernels": (
        "_python_dispatch.is_traceable_wrapper_subclass",
    ),
    "activation checkpointing would exchange and observe batch statistics twice": (
        "_C._current_graph_task_id",
        "_autograd._top_saved_tensors_default_hooks",
        "checkpoint._CheckpointFrame",
    ),
    "SyncBatchNorm would fail in evaluation under torch.func and forward differentiation": (
        "_C._are_functorch_transforms_active",
        "forward_ad._current_level",
    ),
    "amp_C would keep fake tensors as step counts, and later steps would do nothing": (
        "_C._len_torch_dispatch_stack",
    ),
    "conversion would not find a model's batch normalization, or convert a lazy one": (
        "batchnorm._BatchNorm",
        "batchnorm._LazyNormBase",
    ),
    "masters of apex.amp would not follow a model that is loaded between two steps": (
        "Module._version",  # found by its name; it is that of tensors
    ),
    "conversion could not move parameters, buffers and layers as they are": (
        "Module._parameters",
        "Module._buffers",
        "Module._modules",
        "Module._non_persistent_buffers_set",
    ),
    "conversion would lose the hooks of a layer": ("Module._*hook*",),
}
NAMES = [name for names in PIECES.values() for name in names]
#: The step reaches the part of a sharded parameter in this process, and sums norms over processes.
NATIVE = {
    "DTensor._local_tensor",
    "DTensor._spec",
    "_c10d_functional::all_reduce_",
    "_c10d_functional::wait_tensor",
}
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

# Names that a subclass or a scaler shares with torch by convention, wherever they are spelled.
_OWNERS: dict[str, Any] = {
    "GradScaler": torch.amp.GradScaler("cpu"),
    "Optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    "Module": torch.nn.Module(),
}
_CONVENTIONS = {"_step_supports_amp_scaling", "hooked"}
_PLACES: dict[str, Any] = {
    **_OWNERS,
    "_C": torch._C,
    "_autograd": torch._C._autograd,
    "_python_dispatch": _python_dispatch,
    "batchnorm": batchnorm,
    "checkpoint": torch.utils.checkpoint,
    "forward_ad": forward_ad,
    "grad_scaler": grad_scaler,
    "placement_types": placement_types,
    "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
}


@pytest.mark.parametrize("name", sorted({*NAMES} - _CONVENTIONS - {"Module._*hook*"}))
def test_torch_still_has_it(name: str) -> None:
    place, _, attribute = name.partition(".")
    assert hasattr(_PLACES[place], attribute)


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
    assert used == set(NAMES)


def test_every_piece_in_native_use_is_listed_and_every_listed_piece_is_in_use() -> None:
    used: set[str] = set()
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"\b(?:at::_\w+|_c10d_functional::\w+)", text))
        used |= {f"DTensor.{name}" for name in re.findall(r'"(_local_tensor|_spec)"', text)}
        used |= set(re.findall(r"#include <(torch/csrc/(?!api/)[^>]*)>", text))
    assert used == NATIVE | COMPILED
