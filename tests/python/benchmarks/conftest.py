# SPDX-License-Identifier: BSD-3-Clause
"""Makes the programs in benchmarks/ importable for their tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
