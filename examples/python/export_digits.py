# SPDX-License-Identifier: BSD-3-Clause
"""Writes the handwritten digits as the files that the C++ examples read.

Example:
    python examples/python/export_digits.py build/tutorials/digits
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits


def main() -> None:
    """Reads the command line and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    digits.export(digits.load_digits(), arguments.folder)
    print(f"data for the C++ examples: {arguments.folder}")


if __name__ == "__main__":
    main()
