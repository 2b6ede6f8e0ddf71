# SPDX-License-Identifier: BSD-3-Clause
"""Steps of amp_C on the host use the same step counts again, and no call notices another."""

from __future__ import annotations

import threading

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchfuse.apex.native.amp_c import multi_tensor_adam


def adam(count: int, step: int) -> list[Tensor]:
    """The parameters after a step."""
    torch.manual_seed(count)
    lists = [list(torch.rand(count, 3).unbind()) for _ in range(4)]
    flag = torch.zeros(1, dtype=torch.int32)
    multi_tensor_adam(65536, flag, lists, 0.1, 0.9, 0.999, 1e-8, step, 1, 1, 0.0)
    return lists[1]


def in_thread(count: int, step: int) -> list[Tensor]:
    """The same in a thread that has taken no step before."""
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(adam(count, step)))
    thread.start()
    thread.join()
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for tensor, other in zip(found, expected, strict=True):
        assert_same_bits(tensor, other)


def test_steps_of_other_numbers_and_sizes_follow_each_other() -> None:
    for count, step in ((3, 1), (3, 7), (5, 2), (3, 1), (1, 1000), (3, 7)):
        assert_same(adam(count, step), in_thread(count, step))


def test_a_step_in_inference_mode_leaves_later_ones_as_they_are() -> None:
    with torch.inference_mode():
        inside = [tensor.clone() for tensor in adam(4, 3)]
    assert_same(adam(4, 3), in_thread(4, 3))
    assert_same([tensor.clone() for tensor in inside], in_thread(4, 3))


def test_a_step_of_fake_tensors_leaves_later_ones_as_they_are() -> None:
    with FakeTensorMode():
        adam(6, 3)
    assert_same(adam(6, 3), in_thread(6, 3))


def test_a_step_in_a_mode_leaves_later_ones_as_they_are() -> None:
    """The parameters are no fake tensors here, but those that a call makes are."""
    lists = [[torch.ones(3)] for _ in range(4)]
    flag = torch.zeros(1, dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        multi_tensor_adam(65536, flag, lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert_same(adam(1, 1), in_thread(1, 1))


def test_a_step_in_a_transform_leaves_later_ones_as_they_are() -> None:
    def step_beside(x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="non-ATen"):
            adam(7, 1)
        return x

    torch.func.functionalize(step_beside)(torch.ones(2))
    assert_same(adam(7, 1), in_thread(7, 1))
