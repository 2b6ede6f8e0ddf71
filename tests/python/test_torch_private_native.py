# SPDX-License-Identifier: BSD-3-Clause
"""All pieces of torch that the native code relies on although torch does not document them.

test_torch_private.py says why, and has those of Python.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.torch_pieces import Pieces
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROOT = Path(__file__).resolve().parents[2]
PIECES = Pieces()


@PIECES.relies_on(
    "DTensor._local_tensor",
    "DTensor._spec",
    breaks="the step could not reach the part of a sharded parameter that lies in this process, or "
    "compare how gradients are placed",
)
def _dtensors_hold_their_local_tensor() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
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


@PIECES.relies_on(
    "_c10d_functional::all_reduce_",
    "_c10d_functional::wait_tensor",
    breaks="norms could not be summed over the processes that share a parameter",
)
def _functional_collectives() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = init_device_mesh("cpu", (1,)).get_group(0).group_name
        value = torch.ones(2, dtype=torch.float64)
        ops = torch.ops._c10d_functional
        pending = ops.all_reduce_(value, "sum", group)
        assert ops.wait_tensor(pending).data_ptr() == value.data_ptr()
    finally:
        dist.destroy_process_group()


@PIECES.relies_on(
    "at::_amp_foreach_non_finite_check_and_unscale_",
    breaks="the scaler could not unscale gradients that are tensor subclasses, such as DTensor",
)
def _unscaling_op() -> None:
    grads, flag = [torch.tensor([2.0, float("inf")])], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, torch.tensor(0.5))
    assert grads[0].tolist() == [1.0, float("inf")]
    assert flag.item() == 1.0


@PIECES.relies_on(
    "at::_foreach_norm",
    "at::_foreach_mul_",
    "at::_foreach_clamp_min_",
    "at::_foreach_clamp_max_",
    breaks="clipping could not take fp64 gradients, other norms than the second, or values",
)
def _lists_of_tensors() -> None:
    tensors = [torch.tensor([3.0, -4.0]).half(), torch.tensor([1.0]).half()]
    norms = torch._foreach_norm(tensors, 1.0, dtype=torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [
        (7.0, torch.float32),
        (1.0, torch.float32),
    ]
    torch._foreach_mul_(tensors, torch.tensor(0.5, dtype=torch.float64))
    assert [tensor.tolist() for tensor in tensors] == [[1.5, -2.0], [0.5]]
    torch._foreach_clamp_min_(tensors, -1.0)
    torch._foreach_clamp_max_(tensors, 1.0)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, -1.0], [0.5]]


@PIECES.relies_on(
    "at::_foreach_lerp_",
    breaks="averaged models in C++ could not be updated",
)
def _averages_of_lists() -> None:
    averages, values = [torch.tensor([1.0, 3.0])], [torch.tensor([2.0, 1.0])]
    torch._foreach_lerp_(averages, values, 0.25)
    assert averages[0].tolist() == [1.25, 2.5]


@PIECES.relies_on(
    "torch/csrc/autograd/python_variable.h",
    "torch/csrc/utils/pybind.h",
    breaks="the bindings could not take tensors from Python objects",
)
def _headers_are_shipped() -> None:
    include = Path(torch.__file__).parent / "include"
    text = (include / "torch/csrc/autograd/python_variable.h").read_text(encoding="utf-8")
    assert "THPVariable_Check" in text
    assert "THPVariable_Unpack" in text
    assert (include / "torch/csrc/utils/pybind.h").is_file()


@PIECES.relies_on(
    "torch/csrc/Exceptions.h",
    breaks="errors of torch in native code would lose their class, torch.OutOfMemoryError for one",
)
def _exceptions_keep_their_classes() -> None:
    include = Path(torch.__file__).parent / "include"
    text = (include / "torch/csrc/Exceptions.h").read_text(encoding="utf-8")
    assert re.search(r"\btranslate_exception_to_python\(", text)


@PIECES.relies_on(
    "torch/csrc/autograd/autograd.h",
    "torch/csrc/autograd/custom_function.h",
    breaks="synchronized batch normalization in C++, and so in Python, would have no gradients",
)
def _autograd_headers_are_shipped() -> None:
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "autograd"
    text = (folder / "custom_function.h").read_text(encoding="utf-8")
    for name in ("save_for_backward", "mark_non_differentiable", "needs_input_grad"):
        assert name in text
    assert "variable_list grad(" in (folder / "autograd.h").read_text(encoding="utf-8")


@PIECES.relies_on(
    "torch/csrc/autograd/autograd_not_implemented_fallback.h",
    breaks="gradients through operators without a derivative would be lost instead of refused",
)
def _fallback_without_derivative_is_shipped() -> None:
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "autograd"
    text = (folder / "autograd_not_implemented_fallback.h").read_text(encoding="utf-8")
    assert re.search(r"\bautogradNotImplementedFallback\(\)", text)


@PIECES.relies_on(
    "torch/csrc/distributed/c10d/GroupRegistry.hpp",
    "torch/csrc/distributed/c10d/ProcessGroup.hpp",
    "torch/csrc/distributed/c10d/Store.hpp",
    breaks="the native layer could not find a process group by its name, sum over it, or ask who "
    "is lost",
)
def _process_group_headers_are_shipped() -> None:
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    for file, names in {
        "GroupRegistry.hpp": ["resolve_process_group", "register_process_group"],
        "ProcessGroup.hpp": ["getBackend(", "getDefaultBackend(", "getStore(", "getGroupName("],
        "Backend.hpp": ["allreduce(", "_allgather_base(", "getBackendOptions("],
        "Types.hpp": ["asyncOp"],
        "Store.hpp": ["check(", "set("],
    }.items():
        text = (folder / file).read_text(encoding="utf-8")
        assert [name for name in names if name not in text] == []


@PIECES.relies_on(
    "torch/csrc/autograd/engine.h",
    "torch/csrc/autograd/function.h",
    "torch/csrc/autograd/function_hook.h",
    "torch/csrc/autograd/variable.h",
    breaks="data parallelism in C++ would not see when gradients are complete",
)
def _engine_headers_are_shipped() -> None:
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "autograd"
    for file, name in {
        "engine.h": "queue_callback(",
        "function_hook.h": "FunctionPostHook",
        "variable.h": "grad_accumulator(",
    }.items():
        assert name in (folder / file).read_text(encoding="utf-8")
    # From torch 2.15 on function.h includes the header that has the class.
    headers = [folder / name for name in ("function.h", "node.h") if (folder / name).exists()]
    assert any("add_post_hook(" in header.read_text(encoding="utf-8") for header in headers)


@PIECES.relies_on(
    "torch/csrc/distributed/c10d/PrefixStore.hpp",
    "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp",
    "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
    "torch/csrc/distributed/c10d/TCPStore.hpp",
    breaks="C++ programs could not make a process group",
)
def _backend_headers_are_shipped() -> None:
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    for file, name in {
        "PrefixStore.hpp": "PrefixStore(",
        "ProcessGroupGloo.hpp": "create_default(",
        "ProcessGroupNCCL.hpp": "ProcessGroupNCCL(",
        "TCPStore.hpp": "TCPStoreOptions",
    }.items():
        assert name in (folder / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PIECES.names)
def test_piece(name: str) -> None:
    PIECES.check(name)


def test_every_piece_in_use_is_listed_and_every_listed_piece_is_in_use() -> None:
    used: set[str] = set()
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"\b(?:at::_\w+|_c10d_functional::\w+)", text))
        used |= {f"DTensor.{name}" for name in re.findall(r'"(_local_tensor|_spec)"', text)}
        used |= set(re.findall(r"#include <(torch/csrc/(?!api/)[^>]*)>", text))
    assert used == set(PIECES.names)
