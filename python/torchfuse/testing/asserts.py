# SPDX-License-Identifier: BSD-3-Clause
"""Assertions on the difference between two results.

After 100 steps, torch's Adam implementations differ from each other by 2e-4 elementwise near zero,
by 4e-6 relative to max(|ref|, 1e-2), and by far less in norm. The tolerances are chosen from these
differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NORM_TOLERANCE = 2e-6
ELEMENT_TOLERANCE = 5e-6
ELEMENT_FLOOR = 1e-2


def _as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _pairs(
    ours: Tensor | Sequence[Tensor], reference: Tensor | Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    ours, reference = _as_list(ours), _as_list(reference)
    if len(ours) != len(reference):
        raise AssertionError(f"expected {len(reference)} tensors, got {len(ours)}")
    for index, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        if mine.shape != theirs.shape:
            raise AssertionError(
                f"tensor {index}: expected shape {list(theirs.shape)}, got {list(mine.shape)}"
            )
    return list(zip(ours, reference, strict=True))


def _fp64(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def assert_close_to_torch(
    ours: Tensor | Sequence[Tensor],
    reference: Tensor | Sequence[Tensor],
    *,
    norm_tolerance: float = NORM_TOLERANCE,
    element_tolerance: float = ELEMENT_TOLERANCE,
) -> None:
    """Asserts that fp32 parameters after about 100 steps are close to torch's.

    Every tensor must satisfy ``norm(ours - ref) <= norm_tolerance * norm(ref)``, and every element
    ``abs(ours - ref) <= element_tolerance * max(abs(ref), 1e-2)``.

    Args:
        ours (Tensor | Sequence[Tensor]): Results to check, with any floating dtype and device.
        reference (Tensor | Sequence[Tensor]): Expected values with the same shapes.
        norm_tolerance (float, default 2e-6): Largest relative error of a tensor in norm.
        element_tolerance (float, default 5e-6): Largest relative error of an element.

    Raises:
        AssertionError: If a tolerance is exceeded. The message contains the index and the error.

    Example:
        >>> import torch
        >>> from torchfuse.testing import assert_close_to_torch
        >>> assert_close_to_torch(torch.ones(2), torch.ones(2) * (1 + 1e-6))
    """
    for index, (mine, theirs) in enumerate(_pairs(ours, reference)):
        mine, theirs = _fp64(mine), _fp64(theirs)
        difference, size = float((mine - theirs).norm()), float(theirs.norm())
        error = difference / size if size > 0.0 else difference
        # `not <=` also fails for NaN.
        if not error <= norm_tolerance:
            raise AssertionError(
                f"tensor {index}: expected a relative error in norm of at most {norm_tolerance:g}, "
                f"got {error:.3g}"
            )
        scaled = (mine - theirs).abs() / theirs.abs().clamp_min(ELEMENT_FLOOR)
        if scaled.numel() and not float(scaled.max()) <= element_tolerance:
            worst = int(scaled.argmax())
            raise AssertionError(
                f"tensor {index}, element {worst}: expected an error of at most "
                f"{element_tolerance:g} max(|ref|, {ELEMENT_FLOOR:g}), "
                f"got {float(scaled.max()):.3g} ({float(mine.flatten()[worst])!r} against "
                f"{float(theirs.flatten()[worst])!r})"
            )


def assert_bitwise_equal(
    ours: Tensor | Sequence[Tensor], reference: Tensor | Sequence[Tensor]
) -> None:
    """Asserts equal dtypes and equal bits, including NaN payloads and the sign of zero.

    Args:
        ours (Tensor | Sequence[Tensor]): Results to check.
        reference (Tensor | Sequence[Tensor]): Expected values with the same shapes.

    Raises:
        AssertionError: If dtypes or bits differ. The message contains the tensor's index, the first
            different element and both values.

    Example:
        >>> import torch
        >>> from torchfuse.testing import assert_bitwise_equal
        >>> assert_bitwise_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    """
    for index, (mine, theirs) in enumerate(_pairs(ours, reference)):
        if mine.dtype != theirs.dtype:
            raise AssertionError(f"tensor {index}: expected {theirs.dtype}, got {mine.dtype}")
        different = (_bytes(mine) != _bytes(theirs)).any(dim=1)
        if bool(different.any()):
            first = int(different.nonzero()[0])
            raise AssertionError(
                f"tensor {index}: {int(different.sum())} of {different.numel()} elements differ, "
                f"first element {first}: {mine.flatten()[first].item()!r} against "
                f"{theirs.flatten()[first].item()!r}"
            )


def _bytes(tensor: Tensor) -> Tensor:
    """Returns each element's bytes in row-major order, with shape [numel, itemsize]."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.element_size())
