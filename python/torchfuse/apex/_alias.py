# SPDX-License-Identifier: BSD-3-Clause
"""Makes `apex` resolve to torchfuse in this process, and undoes it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torchfuse.apex._contents import fused_optimizers, modules


def _explanation(name: str) -> str:
    parallel = {*modules()["apex.parallel"], "LARC"}
    return (
        f"torchfuse does not provide {name} yet, only apex.optimizers "
        f"({', '.join(sorted(fused_optimizers()))}), apex.parallel "
        f"({', '.join(sorted(parallel))}), apex.contrib.clip_grad and apex.multi_tensor_apply. "
        "Its page on migration names what to use instead"
    )


class _AliasModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        message = f"module {self.__name__!r} has no attribute {name!r}"
        if not name.startswith("_"):
            message = f"{message}: {_explanation(f'{self.__name__}.{name}')}"
        raise AttributeError(message)


class _CallableModule(_AliasModule):
    """apex.parallel.LARC, a module that reads like the class in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _last_name(self.__name__))(*args, **kwargs)


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and fills every module named `apex` or below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "apex":
            return None
        names = modules()
        if fullname not in names:
            # Under its own name, `from apex import amp` would replace the message.
            raise ModuleNotFoundError(f"{_explanation(fullname)}.", name="apex")
        is_package = any(name.startswith(f"{fullname}.") for name in names)
        return ModuleSpec(fullname, self, origin="torchfuse.apex", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        reads_like_a_class = _last_name(spec.name) in modules()[spec.name]
        return (_CallableModule if reads_like_a_class else _AliasModule)(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        contents = modules()
        vars(module).update(contents[module.__name__])
        # apex imports its submodules too: programs say `import apex` and use all of it.
        children = [name for name in contents if name.rpartition(".")[0] == module.__name__]
        for child in children:
            importlib.import_module(child)
        public = [*contents[module.__name__], *map(_last_name, children)]
        vars(module)["__all__"] = sorted(public)


_FINDER = _AliasFinder()


def install() -> None:
    """Makes `import apex` and the modules below it resolve to torchfuse, in this process.

    `apex.optimizers`, `apex.parallel`, `apex.contrib.clip_grad` and `apex.multi_tensor_apply`, with
    their submodules, hold what torchfuse itself has. Other names of apex raise ModuleNotFoundError,
    with a message that says so; `importlib.util.find_spec` raises it for them too. A second call
    changes nothing.

    Raises:
        RuntimeError: if an apex has been imported or could be: the alias never hides one.

    Example:
        >>> import torchfuse.apex
        >>> torchfuse.apex.install()
        >>> from apex.optimizers import FusedAdam
        >>> FusedAdam
        <class 'torchfuse.optimizers.fused_adam.FusedAdam'>
        >>> torchfuse.apex.uninstall()
    """
    if _FINDER in sys.meta_path:
        return
    imported = [name for name in sys.modules if name.partition(".")[0] == "apex"]
    if imported:
        raise RuntimeError(
            "torchfuse.apex.install: expected no apex to be imported yet, got "
            f"{sys.modules[imported[0]]!r}. Install the alias first, where no other apex is found."
        )
    found = importlib.util.find_spec("apex")
    # A folder of that name without an __init__.py, such as a checkout, has no origin.
    if found is not None and found.origin is not None:
        raise RuntimeError(
            "torchfuse.apex.install: expected no apex to be installed, got one at "
            f"{found.origin}. Remove it (pip uninstall apex), or use it without the alias."
        )
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undoes `install()`: `import apex` finds again what it found before.

    Names that were imported from the alias stay usable. Without an alias, nothing happens.

    Example:
        >>> import sys
        >>> import torchfuse.apex
        >>> torchfuse.apex.install()
        >>> import apex
        >>> torchfuse.apex.uninstall()
        >>> "apex" in sys.modules
        False
    """
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    for name, module in list(sys.modules.items()):
        if isinstance(module, _AliasModule):
            del sys.modules[name]
