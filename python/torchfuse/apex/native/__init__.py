# SPDX-License-Identifier: BSD-3-Clause
"""apex's native modules, with its positional arguments, over the operators of torchfuse and torch.

The chunk size, their first argument, has no effect: kernels choose their own.
"""
