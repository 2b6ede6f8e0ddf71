# SPDX-License-Identifier: BSD-3-Clause
"""The alias in the processes that `multiprocessing` starts.

A process that is not forked imports the main program again, before anything in that program could
install the alias. First it unpickles what it has to know; an object in there installs the alias.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
from typing import Any

from torchfuse.apex._alias import install


class _Installs:
    """Installs the alias where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install_in_all_processes, ()


def install_in_all_processes() -> None:
    """As `install()`, here and in every process that `multiprocessing` starts from here."""
    install()
    inner = multiprocessing.spawn.get_preparation_data
    if getattr(inner, "_installs_alias", False):
        return

    @functools.wraps(inner)
    def with_alias(name: str) -> dict[str, Any]:
        return {"torchfuse_apex": _Installs(), **inner(name)}

    with_alias._installs_alias = True  # type: ignore[attr-defined]
    multiprocessing.spawn.get_preparation_data = with_alias
