# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy: losses and gradients by torch's in fp64, and bad input by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchfuse.losses import FusedCrossEntropyLoss, softmax_cross_entropy

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
TOLERANCE = {F32: 2e-6, F16: 1e-3, BF16: 8e-3, F64: 1e-13}
INF = float("inf")


def reference(
    logits: Tensor, labels: Tensor, grad: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    x = logits.detach().double().requires_grad_()
    losses = functional.cross_entropy(x, labels, reduction="none", **options)
    (dx,) = torch.autograd.grad(losses, x, grad.double())
    return losses.detach(), dx


def run(logits: Tensor, labels: Tensor, grad: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    x = logits.detach().requires_grad_()
    losses = softmax_cross_entropy(x, labels, **options)
    (dx,) = torch.autograd.grad(losses, x, grad.to(losses.dtype))
    return losses.detach(), dx


@pytest.mark.parametrize(
    ("dtype", "smoothing"), [(F32, 0.1), (F64, 0.0), (F16, 1.0), (BF16, 0.1)], ids=str
)
@pytest.mark.parametrize("shape", [(1, 1), (70, 33), (2, 4099), (0, 4)])
def test_losses_and_gradients(dtype: torch.dtype, smoothing: float, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(shape, dtype=F64) * 3).to(dtype)
    labels = torch.randint(shape[1], shape[:1])
    grad = torch.randn(shape[0], dtype=F64).to(dtype)
    losses, dx = run(logits, labels, grad, smoothing=smoothing)
    expected, expected_dx = reference(logits, labels, grad, label_smoothing=smoothing)
    assert losses.dtype == dx.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
    largest = grad.abs().amax().item() if len(grad) else 0.0
    torch.testing.assert_close(dx.double(), expected_dx, rtol=0, atol=tolerance * (1 + largest))


def test_fp32_losses_of_strided_16_bit_logits() -> None:
    logits, labels = torch.randn(50, 6).half().t(), torch.randint(50, (6,))
    losses, dx = run(logits, labels, torch.ones(6), dtype=F32)
    expected, expected_dx = reference(logits, labels, torch.ones(6))
    assert losses.dtype == F32
    assert dx.dtype == F16
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), expected_dx, rtol=1e-3, atol=1e-3)


def test_ignored_rows_have_neither_loss_nor_gradient() -> None:
    logits = torch.randn(4, 6)
    labels = torch.tensor([1, -7, 3, -7])
    losses, dx = run(logits, labels, torch.ones(4), ignore_index=-7)
    assert torch.equal(losses[1::2], torch.zeros(2))
    assert torch.equal(dx[1::2], torch.zeros(2, 6))
    assert (dx[::2] != 0).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_infinite_and_large_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [
            [-INF, 0.0, 1.0, -INF],
            [1e4, -1e4, 0.0, 1.0],
            [-300.0, -100.0, -INF, 0.0],
            [-INF, -INF, -INF, -INF],
            [0.0, INF, 0.0, 0.0],
            [0.0, float("nan"), 0.0, 0.0],
        ]
    ).to(dtype)
    labels = torch.tensor([2, 0, 3, 0, 0, 0])
    losses, dx = run(logits, labels, torch.ones(6))
    expected, expected_dx = reference(logits, labels, torch.ones(6))
    torch.testing.assert_close(losses[:3].double(), expected[:3], rtol=1e-2, atol=1e-2)
    assert losses[3:].isnan().all() or torch.equal(losses[3:].isnan(), expected[3:].isnan())
    torch.testing.assert_close(dx[:3].double(), expected_dx[:3], rtol=1e-2, atol=1e-2)
    assert torch.equal(dx[0, 0], torch.zeros((), dtype=dtype))
    assert dx[3:].isnan().any(dim=1).all()


def test_gradients_from_the_rounded_sum_alone_are_apexs() -> None:
    logits, labels = torch.tensor([[3e38, 3e38, 3e38]]), torch.tensor([0])
    ops = torch.ops.torchfuse
    losses, log_sum_exp, rest = ops.softmax_cross_entropy_forward(logits, labels)
    assert torch.equal(log_sum_exp, logits[:, 0])
    torch.testing.assert_close(rest, losses)
    backward = ops.softmax_cross_entropy_backward
    without = backward(torch.ones(1), logits, log_sum_exp, labels)
    assert without.tolist() == [[0.0, 1.0, 1.0]]
    whole = backward(torch.ones(1), logits, log_sum_exp, labels, rest=rest)
    torch.testing.assert_close(whole, torch.tensor([[-2 / 3, 1 / 3, 1 / 3]]))
    with pytest.raises(
        RuntimeError,
        match=r"softmax_cross_entropy_backward: expected rest to be a contiguous Float tensor of "
        r"1 elements, got Double of shape \[1\]\. Pass the forward pass's result unchanged\.",
    ):
        backward(torch.ones(1), logits, log_sum_exp, labels, rest=rest.double())


def test_gradients_of_gradients() -> None:
    logits = torch.randn(4, 5, dtype=F64, requires_grad=True)
    labels = torch.tensor([0, 4, 9, 2])

    def function(x: Tensor) -> Tensor:
        return softmax_cross_entropy(x, labels, smoothing=0.2, ignore_index=9)

    assert torch.autograd.gradcheck(function, logits)
    assert torch.autograd.gradgradcheck(function, logits)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 5, 4, 3)])
def test_the_module_is_torchs(reduction: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(shape, requires_grad=True)
    labels = torch.randint(5, shape[:1] + shape[2:]) if len(shape) > 1 else torch.tensor(3)
    if labels.dim() > 0:
        labels.view(-1)[0] = -100
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
    found = FusedCrossEntropyLoss(**options)(logits, labels)
    expected = torch.nn.CrossEntropyLoss(**options)(logits, labels)
    torch.testing.assert_close(found, expected)
    (dx,) = torch.autograd.grad(found.sum(), logits)
    (expected_dx,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(dx, expected_dx)


@pytest.mark.parametrize(("reduction", "dtype"), [("none", F16), ("mean", BF16)], ids=str)
def test_losses_under_autocast_are_of_torchs_dtype(reduction: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(7, 5), torch.randn(9, 7)
    labels = torch.randint(5, (9,))
    with torch.autocast("cpu", dtype):
        logits = (x @ weight).requires_grad_()
        assert logits.dtype == dtype
        found = FusedCrossEntropyLoss(reduction=reduction)(logits, labels)
        expected = torch.nn.CrossEntropyLoss(reduction=reduction)(logits, labels)
        losses = softmax_cross_entropy(logits, labels)
        kept = softmax_cross_entropy(logits, labels, dtype=dtype)
    torch.testing.assert_close(found, expected)
    assert (found.dtype, losses.dtype, kept.dtype) == (torch.float32, torch.float32, dtype)
    # The scale of a scaler at its start: a gradient of 16-bit losses would be infinite.
    (gradient,) = torch.autograd.grad(losses.mean() * 65536.0, logits)
    assert gradient.isfinite().all()


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


# What is refused.


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


INDICES = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("input", "target", "error", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.ones(2, 3),
            TypeError,
            r"got torch\.float32 of shape \[2, 3\]\. For probabilities",
        ),
        (torch.zeros(4, 10, 3), INDICES, ValueError, r"target to have the shape \[.*\], which is"),
        (torch.zeros(4, 10), INDICES[:, None], ValueError, "target to have the shape"),
        (torch.zeros(10), INDICES[:1], ValueError, "target to have the shape"),
        (torch.zeros(3, 10), INDICES, ValueError, "target to have the shape"),
        (torch.tensor(1.0), INDICES[0], ValueError, "input to have a class dimension"),
    ],
    ids=range(6),
)
def test_the_module_refuses(
    input: Tensor, target: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FusedCrossEntropyLoss(reduction="none")(input, target)


def test_an_unknown_reduction() -> None:
    with pytest.raises(ValueError, match=r"expected reduction to be 'mean', 'sum' or 'none'"):
        FusedCrossEntropyLoss(reduction="average")
