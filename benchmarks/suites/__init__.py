# SPDX-License-Identifier: BSD-3-Clause
"""Benchmark suites: one module per suite, with CASES and MEMORY_CASES."""
