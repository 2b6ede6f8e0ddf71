# SPDX-License-Identifier: BSD-3-Clause
"""Layer and RMS normalization as modules, with apex's names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchfuse._transforms import is_symbolic
from torchfuse.normalization._autocast import cast_dtype
from torchfuse.normalization._functions import as_shape, normalize


class _Normalization(nn.Module):
    """Base class with the parameters and the forward pass."""

    _rms = False
    _weight_dtype_out = False

    if TYPE_CHECKING:  # torch.jit.script() does not support these annotations
        weight: nn.Parameter | None
        bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        elementwise_affine: bool,
        memory_efficient: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.normalized_shape = as_shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient

        def parameter(wanted: bool) -> nn.Parameter | None:
            if not wanted:
                return None
            return nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))

        self.register_parameter("weight", parameter(elementwise_affine))
        if not self._rms:
            self.register_parameter("bias", parameter(elementwise_affine and bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the last dimensions of `input`, which must have the sizes `normalized_shape`.

        Under torch's autocast, an fp32 input is first converted to autocast's dtype, as in apex.
        Under O1 in `apex.amp`, the input is not converted, also as in apex. Programs recorded by
        torch.jit, torch.fx, torch.export or torch.onnx contain torch's operator.

        Args:
            input (Tensor): fp32, fp16, bf16 or fp64.

        Returns:
            A tensor with the input's shape.
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            output = self._in_torch(input)
        else:
            output = self._in_torch(input) if is_symbolic(input) else self._normalized(input)
        return output

    def _in_torch(self, input: Tensor) -> Tensor:
        """Runs the forward pass with torch's operator, for TorchScript and torch.fx."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def _normalized(self, input: Tensor) -> Tensor:
        narrow = cast_dtype(input)
        if narrow is not None and input.dtype == torch.float32:
            input = input.to(narrow)
        weight = self.weight
        weight_dtype = weight.dtype if weight is not None and self._weight_dtype_out else None
        if narrow is not None and weight_dtype == torch.float32:
            weight_dtype = narrow
        return normalize(
            type(self).__name__,
            input,
            self.normalized_shape,
            self.eps,
            self.memory_efficient,
            weight,
            self.bias,
            rms=self._rms,
            dtype=weight_dtype,
        )

    def extra_repr(self) -> str:
        """Returns the arguments for `repr`."""
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        )


class FusedLayerNorm(_Normalization):
    r"""Layer normalization (Ba, Kiros and Hinton 2016), one kernel per pass, on CPU and CUDA.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \gamma + \beta

    over the last dimensions, as in `torch.nn.LayerNorm`, with the same state dict. The output has
    the input's dtype; see `forward` for autocast. Moments are computed in fp32, and in fp64 for
    fp64 inputs. The variance is computed about the mean. Gradients for weight and bias are
    bit-identical on every run and, on the CPU, for any number of threads.

    Args:
        normalized_shape (int | Sequence[int]): Sizes of the last dimensions.
        eps (float, default 1e-5): :math:`\epsilon`, added to the biased variance.
        elementwise_affine (bool, default True): Create `weight` :math:`\gamma` and `bias`
            :math:`\beta`.
        memory_efficient (bool, default False): Save the output for the backward pass instead of the
            input; see `fused_layer_norm_affine`. Gradients cannot be differentiated again.
        bias (bool, default True): Create `bias`, as in torch.
        device (torch.device | str | None, default None): Parameter device.
        dtype (torch.dtype | None, default None): Parameter dtype, which may differ from the input's
            dtype.

    Raises:
        ValueError: In the forward pass, if the input's last dimensions differ from
            `normalized_shape`.
        RuntimeError: In the forward pass, if the input's dtype is not supported, or if the input
            is on another device than the parameters.

    Example:
        >>> import torch
        >>> from torchfuse.normalization import FusedLayerNorm
        >>> norm = FusedLayerNorm(4)
        >>> norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).detach()
        tensor([[-1.3416, -0.4472,  0.4472,  1.3416]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, memory_efficient, bias, device, dtype
        )


class FusedRMSNorm(_Normalization):
    r"""RMS normalization (Zhang and Sennrich 2019), one kernel per pass, on the CPU and on CUDA.

    .. math:: y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} \gamma

    over the last dimensions, as in `torch.nn.RMSNorm`, with the same state dict. There is no bias.
    See :class:`FusedLayerNorm` for the other arguments and the errors. `eps` defaults to 1e-5, as
    in apex; torch's default is the machine epsilon of the input's dtype.

    Example:
        >>> import torch
        >>> from torchfuse.normalization import FusedRMSNorm
        >>> FusedRMSNorm(2)(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[0.8485, 1.1314]])
    """

    _rms = True
    bias = None

    def _in_torch(self, input: Tensor) -> Tensor:
        return functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, memory_efficient, False, device, dtype
        )


class _Mixed(_Normalization):
    """Mixin for an output in the weight's dtype."""

    _weight_dtype_out = True

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **options: Any,
    ) -> None:
        if not options.pop("elementwise_affine", True):
            owner = type(self).__name__
            raise RuntimeError(
                f"{owner}: expected elementwise_affine to be True, got False. "
                f"Use {owner.removeprefix('Mixed')}."
            )
        super().__init__(normalized_shape, eps, True, memory_efficient, **options)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """:class:`FusedLayerNorm` with an output in the weight's dtype, as apex's class for Megatron.

    Under torch's autocast and with an fp32 weight, the output has autocast's dtype, as in apex.

    Args:
        normalized_shape (int | Sequence[int]): Sizes of the last dimensions.
        eps (float, default 1e-5): Added to the biased variance.
        memory_efficient (bool, default False): See :class:`FusedLayerNorm`.
        **options: `bias`, `device` and `dtype`; see :class:`FusedLayerNorm`. `elementwise_affine`
            must be True.

    Raises:
        RuntimeError: If `elementwise_affine` is False.

    Example:
        >>> import torch
        >>> from torchfuse.normalization import MixedFusedLayerNorm
        >>> MixedFusedLayerNorm(4)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def _in_torch(self, input: Tensor) -> Tensor:
        wide = input.to(self.weight.dtype)  # type: ignore[union-attr]
        return functional.layer_norm(wide, self.normalized_shape, self.weight, self.bias, self.eps)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """:class:`FusedRMSNorm` with an output in the weight's dtype.

    See :class:`MixedFusedLayerNorm` for arguments and errors. There is no bias.

    Example:
        >>> import torch
        >>> from torchfuse.normalization import MixedFusedRMSNorm
        >>> MixedFusedRMSNorm(4)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def _in_torch(self, input: Tensor) -> Tensor:
        wide = input.to(self.weight.dtype)  # type: ignore[union-attr]
        return functional.rms_norm(wide, self.normalized_shape, self.weight, self.eps)
