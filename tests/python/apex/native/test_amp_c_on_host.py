# SPDX-License-Identifier: BSD-3-Clause
"""What is computed natively in one call on the host, and step counts that calls use again."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchfuse._C import l2norm_on_host, scale_on_host
from torchfuse.apex.native import amp_c

#: Elements that are put among others, and what the flag becomes.
FLAGS = {1.0: 0, math.inf: 1, math.nan: 1}


def tensors_with(value: float) -> list[Tensor]:
    torch.manual_seed(3)
    tensors = [torch.randn(size) for size in (5, 0, 700)]
    tensors[2][17] = value
    return tensors


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("value", FLAGS)
def test_results_are_those_of_tuples_which_go_the_longer_way(value: float) -> None:
    found, expected_found = flag(), flag()
    tensors, others = tensors_with(value), tensors_with(value)
    assert l2norm_on_host(flag(), [tuple(tensors)]) is None
    assert l2norm_on_host(flag(), [tensors]) is not None
    assert not scale_on_host(flag(), [others, tensors], 0.3)
    assert not scale_on_host(flag(), [tuple(others), tuple(others)], 0.3)
    norms = amp_c.multi_tensor_l2norm(65536, found, [tensors], False)
    expected = amp_c.multi_tensor_l2norm(65536, expected_found, [tuple(others)], False)
    assert found.item() == expected_found.item() == FLAGS[value]
    found.zero_(), expected_found.zero_()
    amp_c.multi_tensor_scale(65536, found, [tensors, list(tensors)], 0.3)
    amp_c.multi_tensor_scale(65536, expected_found, [tuple(others), tuple(others)], 0.3)
    assert found.item() == expected_found.item() == FLAGS[value]
    for ours, theirs in zip([*norms, *tensors], [*expected, *others], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


class Changing(torch.Tensor):
    """Empties a list when it is asked for its strides."""

    victims: list[Tensor]

    @staticmethod
    def __new__(cls, victims: list[Tensor]) -> Changing:
        made = torch.Tensor._make_wrapper_subclass(
            cls, (4,), dispatch_sizes_strides_policy="strides"
        )
        assert isinstance(made, Changing)
        made.victims = victims
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Any = (), kwargs: object = None
    ) -> object:
        args[0].victims.clear()
        return NotImplemented


def test_a_list_may_change_while_it_is_looked_at() -> None:
    tensors: list[Tensor] = []
    tensors += [torch.ones(4), Changing(tensors), *(torch.ones(4) for _ in range(50))]
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        amp_c.multi_tensor_l2norm(65536, flag(), [tensors], False)
    assert tensors == []


@pytest.mark.parametrize("where", ["flag", "tensor"])
def test_what_claims_to_be_a_tensor_is_refused(where: str) -> None:
    fake: Any = Mock(spec=Tensor)
    noop_flag, tensors = (fake, [torch.ones(3)]) if where == "flag" else (flag(), [fake])
    assert l2norm_on_host(noop_flag, [tensors]) is None
    assert not scale_on_host(noop_flag, [tensors, tensors], 2.0)


def test_modes_go_the_longer_way() -> None:
    tensors = tensors_with(1.0)
    with torch.inference_mode():
        assert l2norm_on_host(flag(), [tensors]) is None
    inside: list[object] = []

    def norm_of(tensor: Tensor) -> Tensor:
        inside.append(l2norm_on_host(flag(), [[tensor]]))
        return tensor.sum()

    torch.func.vmap(norm_of)(torch.ones(2, 3))
    with FakeTensorMode():
        fake = torch.ones(3)
        inside.append(l2norm_on_host(flag(), [[fake]]))
        inside.append(scale_on_host(flag(), [[fake], [fake]], 2.0))
    assert inside == [None, None, False]


# Step counts, which the next call of the thread uses again.


def adam(count: int, step: int) -> list[Tensor]:
    """The parameters after a step."""
    torch.manual_seed(count)
    lists = [list(torch.rand(count, 3).unbind()) for _ in range(4)]
    amp_c.multi_tensor_adam(65536, flag(), lists, 0.1, 0.9, 0.999, 1e-8, step, 1, 1, 0.0)
    return lists[1]


def assert_right(count: int, step: int) -> None:
    """The step is that of a thread that has taken none before."""
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(adam, count, step).result()
    for tensor, other in zip(adam(count, step), expected, strict=True):
        assert_same_bits(tensor, other)


def test_steps_of_other_numbers_and_sizes_follow_each_other() -> None:
    for count, step in ((3, 1), (3, 7), (5, 2), (3, 1), (1, 1000), (3, 7)):
        assert_right(count, step)


def test_a_step_in_a_mode_leaves_later_ones_as_they_are() -> None:
    with torch.inference_mode():
        adam(4, 3)
    assert_right(4, 3)
    with FakeTensorMode():
        adam(6, 3)
    assert_right(6, 3)
    # The parameters are no fake tensors here, but those that a call makes are.
    lists = [[torch.ones(3)] for _ in range(4)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        amp_c.multi_tensor_adam(65536, flag(), lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert_right(1, 1)

    def step_beside(x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="non-ATen"):
            adam(7, 1)
        return x

    torch.func.functionalize(step_beside)(torch.ones(2))
    assert_right(7, 1)
