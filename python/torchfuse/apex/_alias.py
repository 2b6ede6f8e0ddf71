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
from torchfuse.apex._registry import children, explanation, is_absent_module, modules, roots

_IMPORTLIB = vars(sys.modules["_frozen_importlib"])


def _called_from(function: str) -> bool:
    """Returns whether importlib's `function` is calling our caller.

    Note [Who asks]
    Python calls the same hooks for an import and for a probe. An import of a missing module raises
    our message, but `importlib.util.find_spec` must return None and `hasattr` must return False. If
    a Python version renames importlib's internal functions, Python's own message appears instead.
    """
    frame = sys._getframe(2)
    while frame.f_globals is _IMPORTLIB:
        if frame.f_code.co_name == function:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


class _AliasModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        fullname = f"{self.__name__}.{name}"
        message = f"module {self.__name__!r} has no attribute {name!r}"
        if fullname in modules:
            # apex imports its submodules itself, so programs use them after `import apex`.
            if sys.modules.get(self.__name__) is self:
                return importlib.import_module(fullname)
            message = f"{message}: the alias has been uninstalled"
        elif not name.startswith("_"):
            sentence = explanation(fullname)
            if _called_from("_handle_fromlist"):  # by `from module import name`
                if is_absent_module(fullname):
                    raise ModuleNotFoundError(f"{sentence}.", name=fullname)
                raise ImportError(f"{sentence}.", name=self.__name__)
            message = f"{message}: {sentence}"
        raise AttributeError(message, name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        # importlib binds a submodule to a name in the parent. In apex.amp, the name _amp_state must
        # stay bound to the state object, which programs use, not to the submodule.
        if not isinstance(value, _AliasModule) or name not in modules[self.__name__].names():
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *vars(self)["__all__"]})


class _CallableModule(_AliasModule):
    """A callable module: calling apex.parallel.LARC constructs the class LARC in the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = modules[self.__name__].call
        assert call is not None
        return getattr(self, call)(*args, **kwargs)


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and fills the alias's modules, unless another finder provides the same name.

    Note [The alias hides nothing]
    Another module of the same name takes precedence, even if the program adds the module to
    sys.path after install(). Examples are an installed apex and a native module of apex. If a
    folder named apex has no __init__.py, the folder may be a checkout of apex, and modules in the
    folder can be imported through the alias.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in roots:
            return None
        parent = fullname.rpartition(".")[0]
        if parent and not isinstance(sys.modules.get(parent), _AliasModule):
            return None
        theirs = self._found_by_other_finders(fullname)
        if theirs is not None and not _is_folder(theirs):
            return theirs
        if fullname not in modules:
            if theirs is None and _called_from("_find_and_load_unlocked"):  # by an import
                raise ModuleNotFoundError(f"{explanation(fullname)}.", name=fullname)
            return theirs
        # Every alias module is a package, because Python looks for submodules only in packages.
        spec = ModuleSpec(fullname, self, origin="torchfuse.apex", is_package=True)
        if theirs is not None:
            spec.submodule_search_locations = theirs.submodule_search_locations
        return spec

    def _found_by_other_finders(self, fullname: str) -> ModuleSpec | None:
        parent = fullname.rpartition(".")[0]
        path: Sequence[str] | None = None
        if parent:
            above = self._found_by_other_finders(parent)
            # If an apex was added after the alias was imported, the submodules of that apex would
            # not match the alias's parent module.
            if above is None or not _is_folder(above):
                return None
            path = above.submodule_search_locations
        for finder in sys.meta_path:
            # Python itself also skips entries without find_spec.
            ask = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = ask(fullname, path) if ask else None
            if spec is not None:
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        kind = _AliasModule if modules[spec.name].call is None else _CallableModule
        return kind(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        objects = modules[module.__name__].objects()
        vars(module).update(objects)
        vars(module)["__all__"] = sorted({*objects, *children(module.__name__)})


def _is_folder(spec: ModuleSpec) -> bool:
    """Returns whether the spec describes a folder without an __init__.py."""
    return spec.loader is None


_FINDER = _AliasFinder()


def install() -> None:
    """Makes `import apex`, its submodules and its native modules resolve to torchfuse.

    Modules such as `apex.optimizers`, `apex.parallel` and `amp_C` provide classes and functions of
    torchfuse. Importing any other apex module raises ModuleNotFoundError, which names a
    replacement, and `importlib.util.find_spec` returns None for the module. The alias applies to
    the current process. A second call has no effect.

    The alias never hides another apex. If a program adds an apex to `sys.path` later, the first
    `import apex` finds that apex. Modules in a folder named `apex` without an `__init__.py` can
    still be imported.

    Raises:
        RuntimeError: if another apex has been imported or can be found.

    Example:
        >>> import torchfuse.apex
        >>> torchfuse.apex.install()
        >>> from apex.optimizers import FusedAdam
        >>> FusedAdam.__mro__[1]
        <class 'torchfuse.optimizers.fused_adam.FusedAdam'>
        >>> torchfuse.apex.uninstall()
    """
    if _FINDER in sys.meta_path:
        return
    imported = [name for name in sys.modules if name.partition(".")[0] == "apex"]
    if imported:
        raise RuntimeError(
            "torchfuse.apex.install: expected no apex to be imported yet, got "
            f"{sys.modules[imported[0]]!r}. Call install() before the first import of apex, in an "
            "environment without another apex."
        )
    found = importlib.util.find_spec("apex")
    if found is not None and not _is_folder(found):
        raise RuntimeError(
            "torchfuse.apex.install: expected no apex to be installed, got one at "
            f"{found.origin or found.loader}. Remove that apex (pip uninstall apex), or run the "
            "program without the alias."
        )
    sys.meta_path.insert(0, _FINDER)


def install_in_all_processes() -> None:
    """Installs the alias here and in every process that `multiprocessing` starts afterwards."""
    install()
    _processes.install_in_child_processes(install_in_all_processes)


def uninstall() -> None:
    """Removes the alias: `import apex` behaves as before `install()`.

    Processes that `multiprocessing` starts afterwards have no alias either. Names that were
    imported from the alias stay usable. Does nothing if the alias is not installed.

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
    _processes.stop_installing_in_child_processes()
    # Submodules from a folder named apex were imported into the alias's package: remove them too.
    all_of_it = isinstance(sys.modules.get("apex"), _AliasModule)
    for name, module in list(sys.modules.items()):
        if isinstance(module, _AliasModule) or (all_of_it and name.startswith("apex.")):
            del sys.modules[name]
