# SPDX-License-Identifier: BSD-3-Clause
"""Installs and removes the alias that makes `apex` resolve to torchfuse in this process."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torchfuse.apex import _processes
from torchfuse.apex._contents import fused_optimizers, modules


def _explanation(name: str) -> str:
    parallel = {*modules()["apex.parallel"], "LARC"}
    return (
        f"torchfuse does not provide {name} yet, only apex.amp, apex.fp16_utils, apex.optimizers "
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
    """The module apex.parallel.LARC, which can be called like the class in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _last_name(self.__name__))(*args, **kwargs)


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and fills `apex` and its submodules, where no other finder has them.

    Note [The alias hides nothing]
    Any other module that Python finds under such a name takes precedence, even if it is added to
    sys.path after install(): an apex with its submodules, or a module in a folder named apex that
    has no __init__.py. Such a folder, perhaps a checkout of apex, stays visible through the alias.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "apex":
            return None
        parent = fullname.rpartition(".")[0]
        if parent and not isinstance(sys.modules.get(parent), _AliasModule):
            return None
        theirs = self._found_by_others(fullname)
        if theirs is not None and not _is_folder(theirs):
            return theirs
        names = modules()
        if fullname not in names:
            if theirs is not None:
                return theirs
            # With the name of the submodule, `from apex import amp` would replace the message.
            raise ModuleNotFoundError(f"{_explanation(fullname)}.", name="apex")
        is_package = any(name.startswith(f"{fullname}.") for name in names)
        spec = ModuleSpec(fullname, self, origin="torchfuse.apex", is_package=is_package)
        if theirs is not None:
            spec.submodule_search_locations = theirs.submodule_search_locations
        return spec

    def _found_by_others(self, fullname: str) -> ModuleSpec | None:
        parent = fullname.rpartition(".")[0]
        path: Sequence[str] | None = None
        if parent:
            above = self._found_by_others(parent)
            # Submodules of an apex that was added after the alias was imported do not match it.
            if above is None or not _is_folder(above):
                return None
            path = above.submodule_search_locations
        for finder in sys.meta_path:
            # As in Python itself, entries without find_spec are skipped.
            ask = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = ask(fullname, path) if ask else None
            if spec is not None:
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        reads_like_a_class = _last_name(spec.name) in modules()[spec.name]
        return (_CallableModule if reads_like_a_class else _AliasModule)(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        contents = modules()
        vars(module).update(contents[module.__name__])
        # apex imports its submodules too: programs write `import apex` and use all of it.
        children = [name for name in contents if name.rpartition(".")[0] == module.__name__]
        for child in children:
            importlib.import_module(child)
        # The state object apex.amp._amp_state hides the submodule of this name.
        vars(module).update(contents[module.__name__])
        public = [*contents[module.__name__], *map(_last_name, children)]
        vars(module)["__all__"] = sorted(public)


def _is_folder(spec: ModuleSpec) -> bool:
    """Whether the spec is that of a folder without an __init__.py, which has no loader."""
    return spec.loader is None


_FINDER = _AliasFinder()


def install() -> None:
    """Makes `import apex` and its submodules resolve to torchfuse, in this process.

    `apex.amp`, `apex.fp16_utils`, `apex.optimizers`, `apex.parallel`, `apex.contrib.clip_grad` and
    `apex.multi_tensor_apply`, with their submodules, provide classes and functions of torchfuse.
    Other modules of apex raise ModuleNotFoundError with a message that names these;
    `importlib.util.find_spec` raises it too. A second call has no effect.

    The alias never hides another apex: one that is added to `sys.path` later is found by the first
    `import apex`, and modules in a folder named `apex` without an `__init__.py` can be imported.

    Raises:
        RuntimeError: if another apex has been imported or can be found.

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
    if found is not None and not _is_folder(found):
        raise RuntimeError(
            "torchfuse.apex.install: expected no apex to be installed, got one at "
            f"{found.origin or found.loader}. Remove it (pip uninstall apex), or use it without "
            "the alias."
        )
    sys.meta_path.insert(0, _FINDER)


def install_in_all_processes() -> None:
    """Installs the alias here and in every process that `multiprocessing` starts from this one."""
    install()
    _processes.hand_down(install_in_all_processes)


def uninstall() -> None:
    """Removes the alias: `import apex` finds what it found before `install()`.

    Processes that `multiprocessing` starts afterwards have no alias either. Names that were
    imported from the alias stay usable. Without an alias, this does nothing.

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
    _processes.stop_handing_down()
    # Including submodules from elsewhere: a module belongs to the package it was imported into.
    all_of_it = isinstance(sys.modules.get("apex"), _AliasModule)
    for name, module in list(sys.modules.items()):
        if isinstance(module, _AliasModule) or (all_of_it and name.startswith("apex.")):
            del sys.modules[name]
