# SPDX-License-Identifier: BSD-3-Clause
"""apex_C: many tensors in one, and views into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchfuse.apex.native.apex_c import flatten, unflatten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_flat_tensor_has_all_elements_in_logical_order(dtype: torch.dtype, device: str) -> None:
    parts = [
        torch.arange(6, device=device).view(2, 3).to(dtype),
        torch.arange(6, 12, device=device).view(3, 2).t().to(dtype),
        torch.empty(0, 5, device=device, dtype=dtype),
        torch.full((), 12, device=device, dtype=dtype),
    ]
    flat = flatten(tuple(parts))
    assert flat.dtype == dtype
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 10, 7, 9, 11, 12]
    views = unflatten(flat, parts)
    assert isinstance(views, list)
    for view, part in zip(views, parts, strict=True):
        assert torch.equal(view, part)
    views[1].fill_(-1)
    assert (flat == -1).sum() == 6
    assert not (parts[1] == -1).any()


def test_the_copy_of_one_tensor_is_a_copy() -> None:
    tensor = torch.ones(3)
    flatten([tensor]).zero_()
    assert tensor.tolist() == [1.0] * 3


def test_no_tensors_are_an_empty_tensor() -> None:
    flat = flatten([])
    assert flat.shape == (0,)
    assert unflatten(flat, []) == []


def test_gradients_pass_through() -> None:
    tensors = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    flatten(tensors).mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert [tensor.grad.tolist() for tensor in tensors if tensor.grad is not None] == [
        *([1.0, 2.0], [3.0])
    ]


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([torch.ones(2), 1.0], TypeError, r"tensors\[1\] to be a tensor, got float"),
        (
            [torch.ones(2), torch.ones(2).half()],
            *(ValueError, r"tensors\[1\] to have the dtype of tensors\[0\], torch.float32, got"),
        ),
        (
            [torch.ones(2), torch.ones(2, device="meta")],
            *(ValueError, r"tensors\[1\] to have the device of tensors\[0\], cpu, got meta"),
        ),
    ],
    ids=["number", "dtype", "device"],
)
def test_tensors_that_do_not_match(tensors: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^flatten: expected {message}"):
        flatten(tensors)


def test_a_flat_tensor_of_another_form() -> None:
    tensors = [torch.ones(2), torch.ones(1, 2)]
    for flat in (torch.ones(3), torch.ones(4, 1), torch.ones(8)[::2]):
        with pytest.raises(ValueError, match=r"^unflatten: expected flat_tensor to be contig"):
            unflatten(flat, tensors)
    with pytest.raises(TypeError, match=r"^unflatten: expected tensors\[0\] to be a tensor, got i"):
        unflatten(torch.ones(4), [4])  # type: ignore[list-item]
