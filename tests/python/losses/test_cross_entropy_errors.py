# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy refuses bad input by name, and takes what has no values or no ignored label."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchfuse.losses import FusedCrossEntropyLoss, softmax_cross_entropy

F16 = torch.float16


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.tensor([0, 3]),
            {},
            r"softmax_cross_entropy_forward: expected labels\[1\] to be from 0 to 2, or "
            r"ignore_index, got 3",
        ),
        (torch.zeros(2, 3), torch.tensor([0, -1]), {}, r"expected labels\[1\] to be from 0 to 2"),
        (
            torch.zeros(2, 3, 4),
            torch.tensor([0, 1]),
            {},
            r"expected logits to be of shape \[N, C\] with at least one class, got \[2, 3, 4\]",
        ),
        (torch.zeros(2, 0), torch.tensor([0, 0]), {}, r"with at least one class, got \[2, 0\]"),
        (
            torch.zeros(2, 3),
            torch.tensor([0]),
            {},
            r"expected labels to be an int64 tensor of shape \[2\], got Long of shape \[1\]",
        ),
        (torch.zeros(2, 3), torch.zeros(2), {}, r"expected labels to be an int64 tensor"),
        (
            torch.zeros(2, 3),
            torch.tensor([0, 1]),
            {"smoothing": 1.5},
            r"expected smoothing to be from 0 to 1, got 1\.5",
        ),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"dtype": F16}, r"expected dtype to be Float"),
    ],
)
def test_bad_input(logits: Tensor, labels: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        softmax_cross_entropy(logits, labels, **options)


def test_probabilities_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"got torch\.float32 of shape \[2, 3\]\. For probabilities"
    ):
        FusedCrossEntropyLoss()(torch.zeros(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("input_shape", "target_shape"),
    [((4, 10, 3), (3, 4)), ((4, 10, 3), (12,)), ((4, 10), (4, 1)), ((10,), (1,)), ((4, 10), (5,))],
)
def test_targets_of_another_shape(
    input_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"expected target to have the shape \[.*\] of input"):
        FusedCrossEntropyLoss(reduction="none")(
            torch.zeros(input_shape), torch.zeros(target_shape, dtype=torch.int64)
        )


def test_an_input_without_classes() -> None:
    with pytest.raises(ValueError, match="expected input to have a dimension of classes"):
        FusedCrossEntropyLoss()(torch.tensor(1.0), torch.tensor(0))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_label_is_ignored(reduction: str) -> None:
    input, target = torch.randn(4, 10), torch.tensor([0, 9, 3, 1])
    found = FusedCrossEntropyLoss(ignore_index=None, reduction=reduction)(input, target)
    expected = torch.nn.CrossEntropyLoss(reduction=reduction)(input, target)
    torch.testing.assert_close(found, expected)


def test_shapes_on_the_meta_device() -> None:
    input = torch.empty(4, 10, dtype=torch.float16, device="meta")
    target = torch.empty(4, dtype=torch.int64, device="meta")
    assert FusedCrossEntropyLoss(reduction="none")(input, target).shape == (4,)
    assert softmax_cross_entropy(input, target).dtype == torch.float16


def test_an_unknown_reduction() -> None:
    with pytest.raises(ValueError, match=r"expected reduction to be 'mean', 'sum' or 'none'"):
        FusedCrossEntropyLoss(reduction="average")
