# SPDX-License-Identifier: BSD-3-Clause
"""`import apex` in this process: what it holds and refuses, and what else may have that name."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing.spawn
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchfuse
import torchfuse.apex
from torchfuse import multi_tensor_apply, normalization, optimizers, parallel
from torchfuse.apex import _alias, _normalization, _optimizers, amp, fp16_utils
from torchfuse.apex._absent import INSTEAD
from torchfuse.apex._alias import install_in_all_processes
from torchfuse.apex._registry import is_absent_module, modules
from torchfuse.apex.native import amp_c, apex_c, fused_layer_norm_cuda, syncbn, xentropy_cuda
from torchfuse.parallel import LARC, Reducer


def run(statements: str) -> dict[str, Any]:
    """Imports as a program does; what it has then."""
    names: dict[str, Any] = {}
    exec(statements, names)
    return names


# What it holds.


@pytest.mark.usefixtures("installed")
def test_the_module_named_larc_can_be_called_like_the_class() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    names = run("from apex.parallel import LARC")
    optimizer = names["LARC"](sgd, trust_coefficient=0.5)
    assert isinstance(optimizer, LARC)
    assert optimizer.trust_coefficient == 0.5
    assert not callable(sys.modules["apex.parallel"])


#: One name of each module; import_lines.txt has the others.
OWN = {
    "apex.optimizers.FusedAdam": _optimizers.FusedAdam,
    "apex.optimizers.fused_adagrad.FusedAdagrad": _optimizers.FusedAdagrad,
    "apex.optimizers.fused_lamb.FusedLAMB": _optimizers.FusedLAMB,
    "apex.optimizers.fused_mixed_precision_lamb.FusedMixedPrecisionLamb": (
        _optimizers.FusedMixedPrecisionLamb
    ),
    "apex.optimizers.fused_novograd.FusedNovoGrad": _optimizers.FusedNovoGrad,
    "apex.optimizers.fused_sgd.FusedSGD": _optimizers.FusedSGD,
    "apex.parallel.LARC.LARC": parallel.LARC,
    "apex.parallel.DistributedDataParallel": parallel.DistributedDataParallel,
    "apex.parallel.SyncBatchNorm": parallel.SyncBatchNorm,
    "apex.parallel.convert_syncbn_model": parallel.convert_syncbn_model,
    "apex.parallel.distributed.DistributedDataParallel": parallel.DistributedDataParallel,
    "apex.parallel.distributed.flat_dist_call": parallel.flat.flat_dist_call,
    "apex.parallel.optimized_sync_batchnorm.SyncBatchNorm": parallel.SyncBatchNorm,
    "apex.parallel.sync_batchnorm.SyncBatchNorm": parallel.SyncBatchNorm,
    "apex.contrib.clip_grad.clip_grad_norm_": torchfuse.clip_grad_norm_,
    "apex.contrib.layer_norm.FastLayerNorm": _normalization.FastLayerNorm,
    "apex.contrib.optimizers.FP16_Optimizer": fp16_utils.FP16_Optimizer,
    "apex.contrib.xentropy.SoftmaxCrossEntropyLoss": _normalization.SoftmaxCrossEntropyLoss,
    "apex.multi_tensor_apply.multi_tensor_applier": multi_tensor_apply.multi_tensor_applier,
    "apex.amp.initialize": amp.initialize,
    "apex.amp._amp_state": amp._amp_state,
    "apex.fp16_utils.FP16_Optimizer": fp16_utils.FP16_Optimizer,
    "apex.normalization.FusedLayerNorm": normalization.FusedLayerNorm,
    "apex.normalization.fused_layer_norm.fused_rms_norm_affine": (
        _normalization.fused_rms_norm_affine
    ),
    "amp_C.multi_tensor_adam": amp_c.multi_tensor_adam,
    "apex_C.flatten": apex_c.flatten,
    "syncbn.welford_parallel": syncbn.welford_parallel,
    "xentropy_cuda.forward": xentropy_cuda.forward,
    "fused_layer_norm_cuda.rms_forward_affine": fused_layer_norm_cuda.rms_forward_affine,
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("path", OWN)
def test_names_are_torchfuses_own(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert run(f"from {module} import {name} as x")["x"] is OWN[path]
    assert run(f"from {module} import *")[name] is OWN[path] or name.startswith("_")
    assert run(f"import {module}; x = {path}")["x"] is OWN[path]


@pytest.mark.usefixtures("installed")
def test_every_optimizer_is_there() -> None:
    module = importlib.import_module("apex.optimizers")
    classes = {name for name in optimizers.__all__ if name.startswith("Fused")}
    assert set(module.__dict__["__all__"]) >= classes - {"FusedOptimizer"} >= {"FusedAdam"}
    assert "FusedOptimizer" not in vars(module)


@pytest.mark.usefixtures("installed")
def test_a_bare_import_has_every_module_at_the_first_access() -> None:
    apex = run("import apex")["apex"]
    assert "apex.parallel.LARC" not in sys.modules
    assert apex.parallel.LARC.LARC is LARC
    assert sys.modules["apex.parallel.LARC"] is apex.parallel.LARC
    hidden = "apex.amp._amp_state"  # by an object of that name
    for name in modules:
        if name.startswith("apex.") and name != hidden:
            found = apex
            for part in name.split(".")[1:]:
                assert part in dir(found)
                found = getattr(found, part)
            assert found is sys.modules[name]


def test_modules_that_were_not_used_go_away_with_the_alias() -> None:
    torchfuse.apex.install()
    apex = run("import apex; apex.optimizers")["apex"]
    torchfuse.apex.uninstall()
    assert issubclass(apex.optimizers.FusedAdam, optimizers.FusedAdam)
    with pytest.raises(AttributeError, match="attribute 'parallel': the alias has been uninstall"):
        _ = apex.parallel


@pytest.mark.usefixtures("installed")
def test_optimizers_leave_unscaled_gradients_and_can_be_pickled() -> None:
    cls = run("from apex.optimizers import FusedAdam as x")["x"]
    assert issubclass(cls, optimizers.FusedAdam)
    assert cls.__name__ == "FusedAdam"
    param = torch.nn.Parameter(torch.ones(2))
    for optimizer in (cls([param]), pickle.loads(pickle.dumps(cls([param])))):
        assert optimizer.write_back_grads == "unscaled"
        assert type(optimizer) is cls
    assert cls([param], write_back_grads=False).write_back_grads is False
    assert optimizers.FusedAdam([param]).write_back_grads is False


LINES = Path(__file__).with_name("import_lines.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("line", [line for line in LINES if line and not line.startswith("#")])
def test_a_statement_has_the_outcome_that_is_listed(line: str) -> None:
    outcome, statement = line.split(maxsplit=1)
    if outcome == "works":
        run(statement)
        return
    answer = r"^torchfuse does not provide .*; (use |of apex it provides |.* provides )"
    with pytest.raises(ImportError, match=answer) as caught:
        run(statement)
    assert type(caught.value).__name__ == outcome


# What it does not hold. These modules stay absent.

MISSING_MODULES = {
    "apex.mlp": "apex.mlp; use torch.nn.Linear and torch.nn.ReLU, with torch.compile.",
    "apex.RNN": "apex.RNN; use torch.nn.LSTM and torch.nn.GRU.",
    "apex.contrib.fmha": "apex.contrib.fmha; use torch.nn.functional.scaled_dot_product_attention.",
    "apex.parallel.multiproc": "apex.parallel.multiproc; use torchrun.",
    "mlp_cuda": "mlp_cuda; use torch.nn.Linear and torch.nn.ReLU, with torch.compile.",
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", MISSING_MODULES)
def test_an_absent_module_is_refused_by_name(name: str) -> None:
    parent, _, last = name.rpartition(".")
    statements = [f"import {name}", f"import {name} as x", f"from {name} import anything"]
    if parent:
        statements.append(f"from {parent} import {last}")
    for statement in statements:
        with pytest.raises(ModuleNotFoundError) as caught:
            run(statement)
        assert caught.value.name == name
        assert str(caught.value) == f"torchfuse does not provide {MISSING_MODULES[name]}"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["apex.moe", "apex.contrib.moe"])
def test_an_unknown_module_is_answered_with_what_there_is(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        run(f"import {name}.of_any_kind")
    assert caught.value.name == name  # the first of the path, as by python
    start, _, listed = str(caught.value).partition("; of apex it provides ")
    assert start == f"torchfuse does not provide {name}"
    assert {"amp_C", "apex.contrib.clip_grad", "apex.optimizers", "apex.parallel"} <= set(
        re.split(r", | and ", listed.rstrip("."))
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("module", "name", "there"),
    [
        ("apex.optimizers", "FusedNone", "apex.optimizers provides FP16_Optimizer, "),
        ("apex.optimizers.fused_adam", "FusedNone", "apex.optimizers.fused_adam provides FusedA"),
        ("apex.parallel", "Nothing", "apex.parallel provides DistributedDataParallel, LARC, R"),
        ("apex_C", "nothing", "apex_C provides flatten and unflatten"),
        ("apex", "nothing", "of apex it provides amp_C, "),
    ],
)
def test_an_absent_name_is_refused_with_the_names_there_are(
    module: str, name: str, there: str
) -> None:
    sentence = re.escape(f"torchfuse does not provide {module}.{name}; {there}")
    with pytest.raises(ImportError, match=f"^{sentence}") as caught:
        run(f"from {module} import {name}")
    assert type(caught.value) is ImportError
    assert caught.value.name == module
    found = importlib.import_module(module)
    with pytest.raises(
        AttributeError, match=f"^module '{module}' has no attribute '{name}': {sentence}"
    ):
        getattr(found, name)


@pytest.mark.usefixtures("installed")
def test_private_names_are_missing_as_python_says() -> None:
    apex = importlib.import_module("apex")
    with pytest.raises(AttributeError, match=r"^module 'apex' has no attribute '__version__'$"):
        _ = apex.__version__
    with pytest.raises(ImportError, match="cannot import name '__version__' from 'apex'"):
        run("from apex import __version__")
    # Modules of similar names are not the alias's.
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'apex_of_another_kind'$"):
        run("import apex_of_another_kind")


# Installing the name, uninstalling it, and what else may have it.


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
