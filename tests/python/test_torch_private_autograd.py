# SPDX-License-Identifier: BSD-3-Clause
"""Those pieces of torch, as in test_torch_private.py, that concern autograd and modules."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import pytest
import torch
from support.torch_pieces import Pieces
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules import batchnorm
from torch.utils import _python_dispatch
from torch.utils.checkpoint import _CheckpointFrame, checkpoint

PIECES = Pieces()


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


@pytest.mark.parametrize("name", PIECES.names)
def test_piece(name: str) -> None:
    PIECES.check(name)
