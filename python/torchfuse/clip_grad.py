# SPDX-License-Identifier: BSD-3-Clause
"""Gradient clipping with the signatures of torch.nn.utils, in native code without host reads.

The lists below have an entry None for a parameter without a gradient, so that errors of the native
functions name a parameter by its index.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers.distributed import is_dtensor, shard_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    r"""Scales the gradients of all parameters in place by one factor that limits their total norm.

    .. math::
        \mathrm{grad} \leftarrow \mathrm{grad} \cdot
        \min\left(1, \frac{\mathrm{max\_norm}}{\mathrm{norm} + 10^{-6}}\right)

    Follows `torch.nn.utils.clip_grad_norm_`, and accepts fp32, fp16, bf16 and fp64 gradients on any
    devices in one list. The 2-norm of fp32, fp16 and bf16 gradients is computed in one read, with
    sums of squares that cannot overflow; other orders and fp64 gradients are computed by torch,
    tensor by tensor, in fp32 for 16-bit gradients and otherwise in the gradient's dtype. The norm
    of DTensors is that of the full tensors, with one collective for all that are sharded alike. An
    optimizer of torchfuse with `max_grad_norm` clips inside its step, without a separate pass.

    Args:
        parameters: a tensor or an iterable of tensors; those without a gradient are skipped.
            Gradients may have any strides but must be dense (torch rejects sparse ones too).
        max_norm: upper limit of the norm, at least 0; infinity measures without clipping.
        norm_type: order of the norm, any number except NaN; infinity is the largest magnitude, and
            0 counts the gradients that are not all zero, as in torch.
        error_if_nonfinite: raise, before anything is written, if the norm is not finite; the host
            waits for the device then. If False, a non-finite norm makes gradients zero or NaN, as
            in torch, and the host waits only if some gradients are on the CPU and others on CUDA.
        foreach: ignored; there is one implementation.

    Returns:
        The norm before clipping, a 0-dim tensor on the first gradient's device. It is fp64 if a
        gradient is, otherwise fp32 (torch returns the gradients' dtype, which overflows in fp16).
        Without gradients it is 0 on the CPU; with DTensors it is a replicated DTensor.

    Raises:
        RuntimeError: if `error_if_nonfinite` and the norm is not finite; the message is torch's.
        NotImplementedError: for a sparse gradient; the message gives its index.
        TypeError: for a parameter that is not a tensor; the message gives its index.
        ValueError: for a negative `max_norm`, a NaN `norm_type` or a DTensor with partial sums.

    Example:
        >>> import torch, torchfuse
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> torchfuse.clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    del foreach
    if isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.",
                stacklevel=2,
            )
    grads = _Gradients("clip_grad_norm_", _grads("clip_grad_norm_", parameters))
    norm = grads.norm(float(norm_type), error_if_nonfinite)
    _C.clip_with_norm_(grads.local, float(max_norm), norm)
    return grads.on_mesh(norm)


def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Clamps every gradient element to [-clip_value, clip_value] in place; NaN stays NaN.

    Follows `torch.nn.utils.clip_grad_value_`.

    Args:
        parameters: a tensor or an iterable of tensors; those without a gradient are skipped.
        clip_value: largest magnitude, at least 0.
        foreach: ignored; there is one implementation.

    Raises:
        NotImplementedError: for a sparse gradient; the message gives its index.
        TypeError: for a parameter that is not a tensor; the message gives its index.
        ValueError: for a negative `clip_value` or a DTensor with partial sums.

    Example:
        >>> import torch, torchfuse
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, -0.25])
        >>> torchfuse.clip_grad_value_(weight, 0.5)
        >>> weight.grad
        tensor([ 0.5000, -0.2500])
    """
    del foreach
    grads = _Gradients("clip_grad_value_", _grads("clip_grad_value_", parameters))
    _C.clip_value_(grads.local, float(clip_value))


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Returns the norm over all elements of all tensors, as :func:`clip_grad_norm_` measures it.

    Follows `torch.nn.utils.get_total_norm`.

    Args:
        tensors: a dense tensor or an iterable of dense tensors, of fp32, fp16, bf16 or fp64.
        norm_type: order of the norm, any number except NaN; see :func:`clip_grad_norm_`.
        error_if_nonfinite: raise if the norm is not finite.
        foreach: ignored; there is one implementation.

    Returns:
        The norm, a 0-dim tensor with the device and dtype that :func:`clip_grad_norm_` describes.

    Raises:
        RuntimeError: if `error_if_nonfinite` and the norm is not finite; the message is torch's.
        NotImplementedError: for a sparse tensor; the message gives its index.
        TypeError: for an entry that is not a tensor; the message gives its index.
        ValueError: for a NaN `norm_type` or a DTensor with partial sums.

    Example:
        >>> import torch, torchfuse
        >>> torchfuse.get_total_norm([torch.tensor([3.0]), torch.tensor([-4.0])])
        tensor(5.)
    """
    del foreach
    listed = _listed("get_total_norm", "tensors", tensors)
    for index, tensor in enumerate(listed):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(
                f"get_total_norm: expected tensors[{index}] to be a tensor, got "
                f"{type(tensor).__name__}. Pass gradients, or other tensors to measure."
            )
    split = _Gradients("get_total_norm", listed)
    return split.on_mesh(split.norm(float(norm_type), error_if_nonfinite))


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Clips the gradients of all parameters in place, given their total norm.

    Follows `torch.nn.utils.clip_grads_with_norm_`: the second half of :func:`clip_grad_norm_`, for
    a norm that includes other gradients too, such as those of other pipeline stages.

    Args:
        parameters: a tensor or an iterable of tensors; those without a gradient are skipped.
        max_norm: upper limit of the norm, at least 0.
        total_norm: norm to clip by, a 1-element tensor such as :func:`get_total_norm` returns.
        foreach: ignored; there is one implementation.

    Raises:
        NotImplementedError: for a sparse gradient; the message gives its index.
        TypeError: for a parameter that is not a tensor; the message gives its index. For a
            `total_norm` that is not a tensor.
        ValueError: for a negative `max_norm` or a `total_norm` of several elements.

    Example:
        >>> import torch, torchfuse
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> torchfuse.clip_grads_with_norm_(weight, 1.0, torch.tensor(10.0))
        >>> weight.grad
        tensor([0.3000, 0.4000])
    """
    del foreach
    grads = _Gradients("clip_grads_with_norm_", _grads("clip_grads_with_norm_", parameters))
    if not isinstance(total_norm, Tensor):
        raise TypeError(
            f"clip_grads_with_norm_: expected total_norm to be a tensor such as get_total_norm() "
            f"returns, got {total_norm!r}."
        )
    whole = total_norm.full_tensor() if is_dtensor(total_norm) else total_norm
    _C.clip_with_norm_(grads.local, float(max_norm), whole)


def _listed(function: str, argument: str, tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    try:
        items = iter(tensors)
    except TypeError as error:
        raise TypeError(
            f"{function}: expected {argument} to be a tensor or an iterable of tensors, got "
            f"{type(tensors).__name__}. Of a model, pass model.parameters()."
        ) from error
    return list(items)


def _grads(function: str, parameters: Tensor | Iterable[Tensor]) -> list[Tensor | None]:
    listed = _listed(function, "parameters", parameters)
    try:
        return [parameter.grad for parameter in listed]
    except AttributeError as error:
        index = next(i for i, item in enumerate(listed) if not hasattr(item, "grad"))
        raise TypeError(
            f"{function}: expected parameters[{index}] to be a tensor, got "
            f"{type(listed[index]).__name__}. Pass a tensor or an iterable of tensors, such as "
            "model.parameters()."
        ) from error


class _Gradients:
    """Gradients; a DTensor is represented by its local shard."""

    def __init__(self, function: str, grads: Sequence[Tensor | None]) -> None:
        self.local = list(grads)
        self._groups: list[list[str]] = []
        self._mesh: DeviceMesh | None = None
        for index, grad in enumerate(grads):
            if type(grad) is Tensor or grad is None or not is_dtensor(grad):
                continue
            if any(placement.is_partial() for placement in grad.placements):
                raise ValueError(
                    f"{function}: expected the gradient of parameters[{index}] to be sharded or "
                    f"replicated, got {grad.placements}. Redistribute it before."
                )
            if self._mesh is None:
                self._mesh = grad.device_mesh
                self._groups = [[] for _ in grads]
            self._groups[index] = shard_groups(grad) or []
            self.local[index] = _local(grad)

    def norm(self, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Returns the norm over the full tensors."""
        norm = _C.get_total_norm(self.local, norm_type, self._groups)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return norm

    def on_mesh(self, norm: Tensor) -> Tensor:
        """Returns the norm as a DTensor if a gradient is one: programs call full_tensor()."""
        if self._mesh is None:
            return norm
        from torch.distributed.tensor import DTensor, Replicate

        placements = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(norm, self._mesh, placements, run_check=False)


def _local(grad: DTensor) -> Tensor:
    """Returns the local shard, after waiting for pending communication."""
    with torch.no_grad():
        part: Any = grad.to_local()
    local: Tensor = part.wait() if hasattr(part, "wait") else part
    return local
