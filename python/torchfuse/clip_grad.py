# SPDX-License-Identifier: BSD-3-Clause
"""Gradient clipping with torch.nn.utils' signatures, in native code without host reads.

Gradient lists below contain None for each parameter without a gradient, so that the indices in
errors from native code are parameter indices.
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

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    r"""Scales all gradients in place by one factor, so that their total norm is at most `max_norm`.

    .. math::
        \mathrm{grad} \leftarrow \mathrm{grad} \cdot
        \min\left(1, \frac{\mathrm{max\_norm}}{\mathrm{norm} + 10^{-6}}\right)

    The formula, the signature and the defaults are from `torch.nn.utils.clip_grad_norm_`. One list
    may contain fp32, fp16, bf16 and fp64 gradients on several devices.

    The 2-norm of fp32, fp16 and bf16 gradients is computed in one pass, and the sum of squares
    cannot overflow. torch computes other orders and the norms of fp64 gradients, tensor by tensor,
    in fp32 for 16-bit gradients and otherwise in the gradient's dtype. For DTensors, the norm is
    over the full tensors, with one collective for all DTensors that are sharded in the same way.

    With `max_grad_norm`, a torchfuse optimizer clips inside the step, without a separate pass.

    Args:
        parameters (Tensor | Iterable[Tensor]): Tensors whose gradients are clipped. Tensors without
            a gradient are skipped. Gradients may have any strides but must be dense, as in torch.
        max_norm (float): Upper limit for the norm, at least 0. Infinity measures without clipping.
        norm_type (float, default 2.0): Order of the norm, any number except NaN. Infinity means the
            largest magnitude. 0 means the number of gradients that are not all zero, as in torch.
        error_if_nonfinite (bool, default False): If the norm is not finite, raise before any
            gradient changes; the host waits for the device. If False, a non-finite norm makes
            gradients zero or NaN, as in torch, and the host waits only if some gradients are on the
            CPU and others on CUDA.
        foreach (bool | None, default None): Ignored, because there is only one implementation.

    Returns:
        The norm before clipping, a 0-dim tensor on the first gradient's device. The dtype is fp64
        if a gradient is fp64, otherwise fp32. (torch returns the gradients' dtype, and fp16
        overflows.) Without gradients, the norm is 0 on the CPU. For DTensors, the norm is a
        replicated DTensor.

    Raises:
        RuntimeError: If `error_if_nonfinite` and the norm is not finite, with torch's message.
        NotImplementedError: If a gradient is sparse. The message contains the parameter's index.
        TypeError: If a parameter is not a tensor. The message contains the parameter's index.
        ValueError: If `max_norm` is negative, `norm_type` is NaN, or a DTensor contains partial
            sums.

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
        parameters (Tensor | Iterable[Tensor]): Tensors whose gradients are clamped. Tensors without
            a gradient are skipped.
        clip_value (float): Largest magnitude, at least 0.
        foreach (bool | None, default None): Ignored, because there is only one implementation.

    Raises:
        NotImplementedError: If a gradient is sparse. The message contains the parameter's index.
        TypeError: If a parameter is not a tensor. The message contains the parameter's index.
        ValueError: If `clip_value` is negative or a DTensor contains partial sums.

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
    """Returns the norm over all elements in all tensors, computed as in :func:`clip_grad_norm_`.

    Follows `torch.nn.utils.get_total_norm`.

    Args:
        tensors (Tensor | Iterable[Tensor]): Dense tensors: fp32, fp16, bf16 or fp64.
        norm_type (float, default 2.0): Order of the norm, any number except NaN; see
            :func:`clip_grad_norm_`.
        error_if_nonfinite (bool, default False): Raise if the norm is not finite.
        foreach (bool | None, default None): Ignored, because there is only one implementation.

    Returns:
        The norm, a 0-dim tensor with the device and dtype described in :func:`clip_grad_norm_`.

    Raises:
        RuntimeError: If `error_if_nonfinite` and the norm is not finite, with torch's message.
        NotImplementedError: If a tensor is sparse. The message contains the tensor's index.
        TypeError: If an entry is not a tensor. The message contains the entry's index.
        ValueError: If `norm_type` is NaN or a DTensor contains partial sums.

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
                f"{type(tensor).__name__}. Pass gradients or other tensors."
            )
    split = _Gradients("get_total_norm", listed)
    return split.on_mesh(split.norm(float(norm_type), error_if_nonfinite))


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Clips all gradients in place with a given total norm.

    Follows `torch.nn.utils.clip_grads_with_norm_`. Together with :func:`get_total_norm`, the
    function replaces :func:`clip_grad_norm_` when the norm includes further gradients, for example
    from other pipeline stages.

    Args:
        parameters (Tensor | Iterable[Tensor]): Tensors whose gradients are clipped. Tensors without
            a gradient are skipped.
        max_norm (float): Upper limit for the norm, at least 0.
        total_norm (Tensor): 1-element tensor with the norm, for example from
            :func:`get_total_norm`.
        foreach (bool | None, default None): Ignored, because there is only one implementation.

    Raises:
        NotImplementedError: If a gradient is sparse. The message contains the parameter's index.
        TypeError: If a parameter or `total_norm` is not a tensor. For a parameter, the message
            contains the index.
        ValueError: If `max_norm` is negative or `total_norm` has several elements.

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
            f"{type(tensors).__name__}. For a model, pass model.parameters()."
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
    """A list of gradients, with each DTensor replaced by its local shard."""

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
                    f"replicated, got {grad.placements}. Redistribute the gradient first."
                )
            if self._mesh is None:
                self._mesh = grad.device_mesh
                self._groups = [[] for _ in grads]
            self._groups[index] = shard_groups(grad) or []
            with torch.no_grad():
                part: Any = grad.to_local()
            # Wait for pending communication.
            self.local[index] = part.wait() if hasattr(part, "wait") else part

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
        """Converts the norm to a DTensor if any gradient is a DTensor, as torch does."""
        if self._mesh is None:
            return norm
        from torch.distributed.tensor import DTensor, Replicate

        placements = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(norm, self._mesh, placements, run_check=False)
