# SPDX-License-Identifier: BSD-3-Clause
"""Makes the programs in tools/ and tests/mutations importable for their tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/mutations")]
