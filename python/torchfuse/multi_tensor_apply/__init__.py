# SPDX-License-Identifier: BSD-3-Clause
"""apex's interface for calling a function on lists of tensors, for programs that use it."""

from torchfuse.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

#: Calls a function with a chunk size of 65,536 elements, apex's default; see `MultiTensorApply`.
multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
