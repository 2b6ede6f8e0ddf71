# SPDX-License-Identifier: BSD-3-Clause
"""Gradient clipping with the signatures of torch.nn.utils, in native code and without a host read.

A parameter without a gradient is an entry None of the lists below, so that the errors of the native
functions name the parameter by its index.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchfuse import _C
from torchfuse.optimizers._shards import is_dtensor, shard_groups

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
    r"""Scales the gradients of all parameters by one number, so that their norm is limited.

    .. math::
        \mathrm{grad} \leftarrow \mathrm{grad} \cdot
        \min\left(1, \frac{\mathrm{max\_norm}}{\mathrm{norm} + 10^{-6}}\right)

    As `torch.nn.utils.clip_grad_norm_`, for fp32, fp16, bf16 and fp64 in one list, on any devices.
    The 2-norm of fp32, fp16 and bf16 gradients is taken in one read, with sums of squares that
    cannot overflow; other orders and fp64 gradients are computed by torch, tensor by tensor, in
    fp32 for 16-bit gradients and in the gradient's own type otherwise. The norm of DTensors is that
    of the whole tensors, with one collective for all that are split alike. An optimizer of
    torchfuse with `max_grad_norm` clips inside its step, without a pass of its own.

    Args:
        parameters: a tensor or an iterable of tensors; those without a gradient are left out.
            Gradients may have any strides, but not be sparse (torch refuses these too).
        max_norm: at least 0; infinity only measures.
        norm_type: order of the norm, any number but NaN; infinity is the largest magnitude, and 0
            counts the gradients that are not all zero, as torch does.
        error_if_nonfinite: raise, before anything is written, if the norm is not finite. Then the
            host waits for the device; otherwise it waits only where gradients are on the CPU and
            others on CUDA. Without it, a norm that is not
            finite makes gradients zero or NaN, as torch's function does.
        foreach: without effect, there is one implementation.

    Returns:
        The norm before clipping, 0-dim, on the first gradient's device: fp64 if a gradient is,
        otherwise fp32, where torch's has the gradients' own type and overflows in fp16. Without
        gradients 0 on the CPU. With DTensors a DTensor that all processes hold.

    Raises:
        RuntimeError: with torch's text, if the norm is not finite and `error_if_nonfinite`.
        NotImplementedError: for a sparse gradient, with its index.
        TypeError: for a parameter that is no tensor, with its index.
        ValueError: for a negative `max_norm`, a `norm_type` of NaN or a DTensor whose parts are yet
            to be added up.

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
    """Puts every element of all gradients into [-clip_value, clip_value]; NaN stays NaN.

    As `torch.nn.utils.clip_grad_value_`.

    Args:
        parameters: as those of :func:`clip_grad_norm_`.
        clip_value: at least 0.
        foreach: without effect, there is one implementation.

    Raises:
        NotImplementedError: for a sparse gradient, with its index.
        TypeError: for a parameter that is no tensor, with its index.
        ValueError: for a negative `clip_value` or a DTensor whose parts are yet to be added up.

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
    """The norm over all elements of all tensors: what :func:`clip_grad_norm_` measures.

    As `torch.nn.utils.get_total_norm`.

    Args:
        tensors: a tensor or an iterable of tensors, as the gradients of :func:`clip_grad_norm_`.
        norm_type: as that of :func:`clip_grad_norm_`.
        error_if_nonfinite: raise if the norm is not finite.
        foreach: without effect, there is one implementation.

    Returns:
        The norm, as :func:`clip_grad_norm_` returns it.

    Raises:
        RuntimeError: with torch's text, if the norm is not finite and `error_if_nonfinite`.
        NotImplementedError: for a sparse tensor, with its index.
        ValueError: for a `norm_type` of NaN or a DTensor whose parts are yet to be added up.

    Example:
        >>> import torch, torchfuse
        >>> torchfuse.get_total_norm([torch.tensor([3.0]), torch.tensor([-4.0])])
        tensor(5.)
    """
    del foreach
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    split = _Gradients("get_total_norm", listed)
    return split.on_mesh(split.norm(float(norm_type), error_if_nonfinite))


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scales the gradients of all parameters by the norm that they are known to have.

    As `torch.nn.utils.clip_grads_with_norm_`: the second half of :func:`clip_grad_norm_`, for a
    norm that more went into, such as the gradients of other stages of a pipeline.

    Args:
        parameters: as those of :func:`clip_grad_norm_`.
        max_norm: at least 0.
        total_norm: what :func:`get_total_norm` returned, or another tensor of one element.
        foreach: without effect, there is one implementation.

    Raises:
        NotImplementedError: for a sparse gradient, with its index.
        TypeError: for a parameter that is no tensor, with its index.
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
    whole = total_norm.full_tensor() if is_dtensor(total_norm) else total_norm
    _C.clip_with_norm_(grads.local, float(max_norm), whole)


def _grads(function: str, parameters: Tensor | Iterable[Tensor]) -> list[Tensor | None]:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
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
    """Gradients, of DTensors the parts that lie in this process."""

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
        """Of the whole tensors."""
        norm = _C.get_total_norm(self.local, norm_type, self._groups)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return norm

    def on_mesh(self, norm: Tensor) -> Tensor:
        """As a DTensor where there were some: programs call full_tensor()."""
        if self._mesh is None:
            return norm
        from torch.distributed.tensor import DTensor, Replicate

        placements = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(norm, self._mesh, placements, run_check=False)


def _local(grad: DTensor) -> Tensor:
    """This process's part, which may still be on its way from other processes."""
    with torch.no_grad():
        part: Any = grad.to_local()
    local: Tensor = part.wait() if hasattr(part, "wait") else part
    return local
