# SPDX-License-Identifier: BSD-3-Clause
"""Makes `import apex` work with torchfuse, for the parts of apex that torchfuse has.

`python -m torchfuse.apex script.py` runs an unmodified program; processes that it starts through
`multiprocessing` have the alias too. In a program, call `install()` before the first `import apex`.
"""

from torchfuse.apex._alias import install, uninstall

__all__ = ["install", "uninstall"]
