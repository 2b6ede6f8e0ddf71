# SPDX-License-Identifier: BSD-3-Clause
"""Why a check could not be made."""

from __future__ import annotations


class CannotCheckError(Exception):
    """Something that the check needs is missing or not understood: no verdict on the kernels."""
