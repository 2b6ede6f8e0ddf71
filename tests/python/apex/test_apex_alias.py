# SPDX-License-Identifier: BSD-3-Clause
"""`import apex` in this process: what it holds, what it refuses, and that it goes away again."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchfuse
import torchfuse.apex
from torchfuse import optimizers
from torchfuse.apex._registry import is_absent_module, modules
from torchfuse.parallel import (
    LARC,
)


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


@pytest.mark.usefixtures("installed")
def test_every_optimizer_is_there() -> None:
    module = importlib.import_module("apex.optimizers")
    classes = {name for name in optimizers.__all__ if name.startswith("Fused")}
    assert set(module.__dict__["__all__"]) >= classes - {"FusedOptimizer"} >= {"FusedAdam"}
    assert "FusedOptimizer" not in vars(module)


APEX_CLASSES = {
    "fused_adagrad": "FusedAdagrad",
    "fused_adam": "FusedAdam",
    "fused_lamb": "FusedLAMB",
    "fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "fused_novograd": "FusedNovoGrad",
    "fused_sgd": "FusedSGD",
}


@pytest.mark.parametrize(("module", "name"), APEX_CLASSES.items())
def test_a_class_appears_as_soon_as_torchfuse_has_it(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = type(name, (optimizers.FusedOptimizer,), {})
    monkeypatch.setattr(optimizers, name, marker, raising=False)
    monkeypatch.setattr(optimizers, "__all__", [*optimizers.__all__, name])
    torchfuse.apex.install()
    try:
        found = importlib.import_module("apex.optimizers").__dict__[name]
        assert issubclass(found, marker)
        assert importlib.import_module(f"apex.optimizers.{module}").__dict__[name] is found
    finally:
        torchfuse.apex.uninstall()


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
        assert optimizer.param_groups[0]["write_back_grads"] == "unscaled"
        assert type(optimizer) is cls
    assert cls([param], write_back_grads=False).param_groups[0]["write_back_grads"] is False
    assert optimizers.FusedAdam([param]).param_groups[0]["write_back_grads"] is False


# The registry.


def test_every_module_of_the_registry_can_be_imported() -> None:
    torchfuse.apex.install()
    try:
        for name, module in modules.items():
            found = importlib.import_module(name)
            assert set(module.names()) <= set(found.__dict__["__all__"])
            assert set(module.names()) <= set(vars(found))
            parent = name.rpartition(".")[0]
            assert not parent or parent in modules
    finally:
        torchfuse.apex.uninstall()


def test_no_module_is_both_there_and_absent() -> None:
    for name in modules:
        assert not is_absent_module(name), f"delete the line of {name} in _absent.py"


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
def test_the_first_absent_module_of_a_path_is_named_as_by_python() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        run("from apex.contrib.multihead_attn.self_multihead_attn import SelfMultiheadAttn")
    assert caught.value.name == "apex.contrib.multihead_attn"


@pytest.mark.usefixtures("installed")
def test_an_unknown_module_is_answered_with_what_there_is() -> None:
    for statement in ("import apex.moe", "import apex.contrib.moe"):
        name = statement.split()[1]
        with pytest.raises(ModuleNotFoundError) as caught:
            run(statement)
        assert caught.value.name == name
        start, _, listed = str(caught.value).partition("; of apex it provides ")
        assert start == f"torchfuse does not provide {name}"
        assert {"amp_C", "apex.contrib.clip_grad", "apex.optimizers", "apex.parallel"} <= set(
            re.split(r", | and ", listed.rstrip("."))
        )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("module", "name", "there"),
    [
        ("apex.optimizers", "FusedNone", "apex.optimizers has FP16_Optimizer, FusedAdagrad, Fus"),
        ("apex.optimizers.fused_adam", "FusedNone", "apex.optimizers.fused_adam has FusedAdam"),
        ("apex.parallel", "Nothing", "apex.parallel has DistributedDataParallel, LARC, Reduce"),
        ("apex_C", "nothing", "apex_C has flatten and unflatten"),
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


@pytest.mark.usefixtures("installed")
def test_modules_of_similar_names_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apex_of_another_kind.py").write_text("value = 3\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert run("import apex_of_another_kind as x")["x"].value == 3
