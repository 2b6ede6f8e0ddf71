# SPDX-License-Identifier: BSD-3-Clause
"""`import apex` in this process: what it holds, what it refuses, and that it goes away again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchfuse
import torchfuse.apex
from torchfuse import optimizers
from torchfuse.apex import amp, fp16_utils
from torchfuse.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    flat,
)


def run(statements: str) -> dict[str, Any]:
    """Imports as a program does; what it has then."""
    names: dict[str, Any] = {}
    exec(statements, names)
    return names


# What it holds.


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("statements", "name", "expected"),
    [
        ("from apex.optimizers import FusedAdam as x", "x", optimizers.FusedAdam),
        ("from apex.optimizers.fused_adam import FusedAdam as x", "x", optimizers.FusedAdam),
        ("import apex; x = apex.optimizers.FusedAdam", "x", optimizers.FusedAdam),
        ("import apex.optimizers as o; x = o.FusedAdam", "x", optimizers.FusedAdam),
        ("from apex import optimizers; x = optimizers.FusedAdam", "x", optimizers.FusedAdam),
        ("from apex.optimizers import *; x = FusedAdam", "x", optimizers.FusedAdam),
        ("from apex import *; x = optimizers.FusedAdam", "x", optimizers.FusedAdam),
        ("from apex import amp; x = amp.initialize", "x", amp.initialize),
        ("import apex; x = apex.amp.scale_loss", "x", amp.scale_loss),
        ("import apex.amp as a; x = a.master_params", "x", amp.master_params),
        ("from apex.amp import _amp_state as x", "x", amp._amp_state),
        ("from apex.fp16_utils import *; x = FP16_Optimizer", "x", fp16_utils.FP16_Optimizer),
        ("from apex.optimizers import FP16_Optimizer as x", "x", fp16_utils.FP16_Optimizer),
        (
            "from apex.contrib.optimizers import FP16_Optimizer as x",
            *("x", fp16_utils.FP16_Optimizer),
        ),
        ("from apex.parallel.LARC import LARC as x", "x", LARC),
        ("import apex; x = apex.parallel.LARC.LARC", "x", LARC),
        ("from apex.parallel import LARC; x = LARC.LARC", "x", LARC),
        ("from apex.parallel import DistributedDataParallel as x", "x", DistributedDataParallel),
        ("import apex; x = apex.parallel.DistributedDataParallel", "x", DistributedDataParallel),
        ("from apex.parallel import Reducer as x", "x", Reducer),
        ("from apex.parallel import ReduceOp as x", "x", torch.distributed.ReduceOp),
        (
            "from apex.parallel.distributed import DistributedDataParallel as x",
            *("x", DistributedDataParallel),
        ),
        ("from apex.parallel.distributed import Reducer as x", "x", Reducer),
        ("from apex.parallel.distributed import flat_dist_call as x", "x", flat.flat_dist_call),
        ("import apex; x = apex.parallel.distributed.flatten", "x", flat.flatten),
        ("import apex; x = apex.parallel.distributed.unflatten", "x", flat.unflatten),
        ("from apex.parallel import SyncBatchNorm as x", "x", SyncBatchNorm),
        ("import apex; x = apex.parallel.SyncBatchNorm", "x", SyncBatchNorm),
        ("from apex.parallel import convert_syncbn_model as x", "x", convert_syncbn_model),
        (
            "from apex.parallel import create_syncbn_process_group as x",
            *("x", create_syncbn_process_group),
        ),
        (
            "from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as x",
            *("x", SyncBatchNorm),
        ),
        ("from apex.parallel.sync_batchnorm import SyncBatchNorm as x", "x", SyncBatchNorm),
        (
            "from apex.contrib.clip_grad import clip_grad_norm_ as x",
            *("x", torchfuse.clip_grad_norm_),
        ),
        (
            "from apex.contrib.clip_grad.clip_grad import clip_grad_norm_ as x",
            *("x", torchfuse.clip_grad_norm_),
        ),
        (
            "from apex.multi_tensor_apply import multi_tensor_applier as x",
            *("x", torchfuse.multi_tensor_apply.multi_tensor_applier),
        ),
        (
            "from apex.multi_tensor_apply import MultiTensorApply as x",
            *("x", torchfuse.multi_tensor_apply.MultiTensorApply),
        ),
        (
            "from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply as x",
            *("x", torchfuse.multi_tensor_apply.MultiTensorApply),
        ),
    ],
)
def test_names_are_torchfuses_own(statements: str, name: str, expected: Any) -> None:
    assert run(statements)[name] is expected


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
        assert importlib.import_module("apex.optimizers").__dict__[name] is marker
        assert importlib.import_module(f"apex.optimizers.{module}").__dict__[name] is marker
    finally:
        torchfuse.apex.uninstall()


@pytest.mark.usefixtures("installed")
def test_probing_for_apex_finds_it() -> None:
    for name in ("apex", "apex.optimizers", "apex.parallel.LARC"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin == "torchfuse.apex"
    assert "torchfuse.apex" in repr(importlib.import_module("apex"))


# What it does not hold.

MISSING = ["apex.RNN", "apex.normalization", "apex.contrib.xentropy", "apex.optimizers.FusedNone"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", MISSING)
def test_other_names_are_refused_by_name(name: str) -> None:
    parent, _, last = name.rpartition(".")
    message = (
        rf"torchfuse does not provide {name} yet, only apex.amp, apex.fp16_utils, "
        r"apex.optimizers \(.*FusedAdam.*\), "
        r"apex.parallel \(DistributedDataParallel, LARC, .*Reducer.*\), apex.contrib.clip_grad "
        r"and apex.multi_tensor_apply"
    )
    for statement in (f"import {name}", f"from {parent} import {last}"):
        with pytest.raises(ModuleNotFoundError, match=message) as caught:
            run(statement)
        assert caught.value.name == "apex"
    with pytest.raises(ModuleNotFoundError, match=message):
        importlib.util.find_spec(name)


@pytest.mark.usefixtures("installed")
def test_other_attributes_are_missing_as_attributes_are() -> None:
    apex = importlib.import_module("apex")
    assert not hasattr(apex, "RNN")
    assert not hasattr(apex, "__version__")
    with pytest.raises(AttributeError, match=r"no attribute 'RNN': torchfuse does not provide ap"):
        _ = apex.RNN
    with pytest.raises(AttributeError, match=r"torchfuse does not provide apex.parallel.multipro"):
        _ = apex.parallel.multiproc
    with pytest.raises(AttributeError, match=r"^module 'apex' has no attribute '__version__'$"):
        _ = apex.__version__


@pytest.mark.usefixtures("installed")
def test_modules_of_similar_names_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apex_of_another_kind.py").write_text("value = 3\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert run("import apex_of_another_kind as x")["x"].value == 3
