# SPDX-License-Identifier: BSD-3-Clause
"""Helpers that the tests share: oracles, comparisons and small builders."""
