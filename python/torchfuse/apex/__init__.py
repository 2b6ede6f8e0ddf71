# SPDX-License-Identifier: BSD-3-Clause
"""`import apex` for programs that were written for it: the part of apex that torchfuse has.

`python -m torchfuse.apex script.py` runs a program that stays as it is; processes that it starts
through `multiprocessing` have the alias too. In a program, call `install()` before the first
`import apex`.
"""

from torchfuse.apex._alias import install, uninstall

__all__ = ["install", "uninstall"]
