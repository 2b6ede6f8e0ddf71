# SPDX-License-Identifier: BSD-3-Clause
"""Installing the name apex, uninstalling it, what else may have that name, and who looks for it."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing.spawn
import sys
from pathlib import Path
from typing import Any

import pytest
from test_apex_alias import run

import torchfuse
import torchfuse.apex
from torchfuse import optimizers
from torchfuse.apex import _alias
from torchfuse.apex._absent import INSTEAD
from torchfuse.apex._alias import install_in_all_processes
from torchfuse.apex._registry import is_absent_module, modules
from torchfuse.parallel import Reducer


def write(path: Path, text: str = "real = True\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_second_install_changes_nothing() -> None:
    torchfuse.apex.install()
    first = importlib.import_module("apex")
    finders = list(sys.meta_path)
    torchfuse.apex.install()
    assert sys.meta_path == finders
    assert importlib.import_module("apex") is first
    torchfuse.apex.uninstall()
    torchfuse.apex.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "apex"]


def test_another_apex_that_is_installed_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "apex" / "__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"expected no apex to be installed, got one at .*apex"):
        torchfuse.apex.install()
    assert run("import apex")["apex"].real
    with pytest.raises(RuntimeError, match="expected no apex to be imported yet, got <module 'ap"):
        torchfuse.apex.install()
    torchfuse.apex.uninstall()
    assert sys.modules["apex"].real
    del sys.modules["apex"]


def test_an_apex_that_comes_later_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "apex" / "__init__.py")
    write(tmp_path / "apex" / "optimizers" / "__init__.py", "")
    write(tmp_path / "apex" / "optimizers" / "of_theirs.py")
    torchfuse.apex.install()
    monkeypatch.syspath_prepend(tmp_path)
    assert run("import apex.optimizers.of_theirs as x")["x"].real
    assert sys.modules["apex"].real
    assert importlib.util.find_spec("apex.parallel") is None
    with pytest.raises(
        ModuleNotFoundError, match=r"^No module named 'apex.optimizers.fused_adam'$"
    ):
        run("import apex.optimizers.fused_adam")
    torchfuse.apex.uninstall()
    assert sys.modules["apex"].real
    for name in ("apex.optimizers.of_theirs", "apex.optimizers", "apex"):
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_an_apex_that_comes_after_the_import_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run("import apex")["apex"].optimizers.FusedAdam
    assert issubclass(found, optimizers.FusedAdam)
    write(tmp_path / "apex" / "__init__.py", "")
    write(tmp_path / "apex" / "mlp.py", "")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"torchfuse does not provide apex.mlp; use"):
        run("import apex.mlp")


@pytest.mark.parametrize("when", ["before install", "after install", "after import"])
def test_modules_in_a_folder_of_that_name_are_not_hidden(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "apex" / "mine.py", "def f(): return 1\n")
    write(tmp_path / "apex" / "contrib" / "mine.py", "def f(): return 2\n")
    write(tmp_path / "apex" / "tools" / "mine.py", "def f(): return 3\n")
    if when == "before install":
        monkeypatch.syspath_prepend(tmp_path)
    torchfuse.apex.install()
    if when == "after import":
        run("import apex.contrib")
    if when != "before install":
        monkeypatch.syspath_prepend(tmp_path)
    names = run(
        "import apex.mine, apex.contrib.mine, apex.tools.mine\n"
        "found = apex.mine.f(), apex.contrib.mine.f(), apex.tools.mine.f()\n"
        "from apex.optimizers import FusedAdam\n"
        "from apex.contrib.clip_grad import clip_grad_norm_\n"
    )
    assert names["found"] == (1, 2, 3)
    assert issubclass(names["FusedAdam"], optimizers.FusedAdam)
    assert names["clip_grad_norm_"] is torchfuse.clip_grad_norm_
    with pytest.raises(ModuleNotFoundError, match=r"torchfuse does not provide apex.mlp; use"):
        run("import apex.mlp")
    torchfuse.apex.uninstall()
    assert run("import apex.mine; found = apex.mine.f()")["found"] == 1
    assert importlib.util.find_spec("apex.optimizers") is None
    for name in ("apex.mine", "apex"):
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_a_module_in_a_folder_comes_before_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "apex" / "optimizers.py")
    monkeypatch.syspath_prepend(tmp_path)
    names = run("import apex.optimizers as theirs; from apex.parallel import Reducer")
    assert names["theirs"].real
    assert names["Reducer"] is Reducer


@pytest.mark.parametrize("when", ["before install", "after install"])
def test_native_modules_of_another_apex_are_not_hidden(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "amp_C.py")
    write(tmp_path / "syncbn.py")
    write(tmp_path / "mlp_cuda.py")
    if when == "before install":
        monkeypatch.syspath_prepend(tmp_path)
        run("import amp_C")
    torchfuse.apex.install()
    if when == "after install":
        monkeypatch.syspath_prepend(tmp_path)
    names = run("import amp_C, apex_C, mlp_cuda, syncbn")
    assert names["amp_C"].real
    assert names["mlp_cuda"].real
    assert names["syncbn"].real
    assert "torchfuse" in repr(names["apex_C"])
    torchfuse.apex.uninstall()
    assert sys.modules["amp_C"].real
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'apex_C'$"):
        run("import apex_C")
    for name in ("amp_C", "mlp_cuda", "syncbn"):
        del sys.modules[name]


@pytest.mark.parametrize("wrapped", [False, True])
def test_uninstall_reaches_the_processes_that_start_later(
    wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn: Any = multiprocessing.spawn
    before = spawn.get_preparation_data
    known = set(before("process"))
    install_in_all_processes()
    install_in_all_processes()
    ours = spawn.get_preparation_data
    assert set(ours("process")) == {*known, "torchfuse_apex"}
    if wrapped:
        monkeypatch.setattr(spawn, "get_preparation_data", lambda name: ours(name))
    torchfuse.apex.uninstall()
    assert set(spawn.get_preparation_data("process")) == known
    assert wrapped or spawn.get_preparation_data is before
    monkeypatch.undo()
    spawn.get_preparation_data = before


# Programs that look for apex before they use it learn the truth.


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", modules)
def test_a_spec_is_found_for_what_there_is(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert (spec.name, spec.origin) == (name, "torchfuse.apex")
    assert "torchfuse.apex" in repr(importlib.import_module(name))
    # And after the import, from sys.modules.
    again = importlib.util.find_spec(name)
    assert again is not None
    assert (again.name, again.origin) == (name, "torchfuse.apex")
    names = set(modules[name].names())
    assert names <= set(vars(sys.modules[name])) & set(vars(sys.modules[name])["__all__"])
    assert not is_absent_module(name), f"delete the line of {name} in _absent.py"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", [*INSTEAD, "apex.nothing", "apex.contrib.nothing", "amp_C.no"])
def test_no_spec_is_found_for_what_there_is_not(name: str) -> None:
    assert importlib.util.find_spec(name) is None
    # Nor after an import has failed.
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    assert importlib.util.find_spec(name) is None


@pytest.mark.usefixtures("installed")
def test_what_is_inside_an_absent_module_is_answered_as_python_does() -> None:
    for name in ("json.nothing.at_all", "apex.mlp.at_all"):
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.util.find_spec(name)
        assert caught.value.name == name.rpartition(".")[0]


@pytest.mark.usefixtures("installed")
def test_a_module_may_probe_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "prober.py",
        "import apex\n"
        "from importlib.util import find_spec\n"
        "found = [find_spec(name) is not None for name in ('apex.mlp', 'mlp_cuda', 'amp_C')]\n"
        "found += [hasattr(apex, 'mlp'), hasattr(apex, 'optimizers')]\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run("from prober import found")["found"] == [False, False, True, False, True]


@pytest.mark.usefixtures("installed")
def test_without_importlibs_functions_python_says_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_alias, "_IMPORTLIB", {})
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'apex.mlp'$") as caught:
        run("import apex.mlp")
    assert caught.value.name == "apex.mlp"
    with pytest.raises(ImportError, match=r"^cannot import name 'mlp' from 'apex'"):
        run("from apex import mlp")
