# SPDX-License-Identifier: BSD-3-Clause
"""apex's interface for calling a function on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`, as apex's class does.

    Args:
        chunk_size (int): Number of elements that apex's functions process at a time, at least 1.
            torchfuse's functions ignore the chunk size, and no result depends on the value.

    Attributes:
        available: Always True. In apex, whether the native module was found.
        warned: Always False. In apex, whether a warning about a missing native module was issued.
        chunk_size: The constructor argument.

    Raises:
        ValueError: If `chunk_size` is below 1.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native import amp_c
        >>> from torchfuse.multi_tensor_apply import MultiTensorApply
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> grad, param, exp_avg, exp_avg_sq = torch.ones(4, 3).unbind()
        >>> lists = [[grad], [param], [exp_avg], [exp_avg_sq]]
        >>> MultiTensorApply(333)(
        ...     amp_c.multi_tensor_adam, flag, lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 0, 0.0
        ... )
        >>> param
        tensor([0.9000, 0.9000, 0.9000])
    """

    available: ClassVar[bool] = True
    warned: ClassVar[bool] = False

    def __init__(self, chunk_size: int) -> None:
        if chunk_size < 1:
            raise ValueError(
                f"MultiTensorApply: expected chunk_size to be at least 1, got {chunk_size}."
            )
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing. apex's method raises RuntimeError if its native module is missing.

        torchfuse cannot be imported without the native library, so there is nothing to check.
        """

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """Calls `op` with the chunk size, the flag, the lists and `args`.

        Args:
            op (Callable): Function to call.
            noop_flag_buffer (Tensor): 1-element int32 tensor on the tensors' device. `op` reads or
                sets the flag.
            tensor_lists (Sequence[Sequence[Tensor]]): Lists or tuples of tensors, of equal length.
            *args (Any): Additional arguments for `op`.

        Returns:
            The return value of `op`.
        """
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


#: A `MultiTensorApply` with apex's default chunk size, 65,536 elements.
multi_tensor_applier = MultiTensorApply(2048 * 32)
