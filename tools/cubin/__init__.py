# SPDX-License-Identifier: BSD-3-Clause
"""Reads compiled CUDA kernels without a GPU and without the toolkit's disassembler."""
