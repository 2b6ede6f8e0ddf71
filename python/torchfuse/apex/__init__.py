# SPDX-License-Identifier: BSD-3-Clause
"""Makes `import apex` resolve to torchfuse, for the modules of apex that torchfuse provides.

`python -m torchfuse.apex script.py` runs an unmodified program. Processes that the program starts
through `multiprocessing` use the alias too. In a program, call `install()` before the first
`import apex`.
"""

from torchfuse.apex._alias import install, uninstall

__all__ = ["install", "uninstall"]
