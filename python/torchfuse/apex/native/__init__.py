# SPDX-License-Identifier: BSD-3-Clause
"""apex's native modules with the same positional arguments, built on torchfuse's and torch's ops.

`chunk_size`, the first argument of amp_C's functions, has no effect.
"""
