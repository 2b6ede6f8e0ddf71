# SPDX-License-Identifier: BSD-3-Clause
"""Benchmark suites: each module defines CASES."""
