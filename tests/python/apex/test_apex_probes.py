# SPDX-License-Identifier: BSD-3-Clause
"""Programs that look for apex before they use it learn the truth."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
from test_apex_alias import run

from torchfuse.apex import _alias
from torchfuse.apex._absent import INSTEAD
from torchfuse.apex._registry import modules

pytestmark = pytest.mark.usefixtures("installed")


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


@pytest.mark.parametrize("name", [*INSTEAD, "apex.nothing", "apex.contrib.nothing", "amp_C.no"])
def test_no_spec_is_found_for_what_there_is_not(name: str) -> None:
    assert importlib.util.find_spec(name) is None
    # Nor after an import has failed.
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    assert importlib.util.find_spec(name) is None


def test_what_is_inside_an_absent_module_is_answered_as_python_does() -> None:
    for name in ("json.nothing.at_all", "apex.mlp.at_all"):
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.util.find_spec(name)
        assert caught.value.name == name.rpartition(".")[0]


def test_a_module_may_probe_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prober.py").write_text(
        "import importlib.util\n"
        "import apex\n"
        "has_mlp = importlib.util.find_spec('apex.mlp') is not None\n"
        "has_native = importlib.util.find_spec('mlp_cuda') is not None\n"
        "has_amp_c = importlib.util.find_spec('amp_C') is not None\n"
        "has_attribute = hasattr(apex, 'mlp')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    prober = run("from prober import *")
    assert [prober[f"has_{x}"] for x in ("mlp", "native", "amp_c", "attribute")] == [
        *(False, False, True, False)
    ]


def test_attributes_can_be_asked_for() -> None:
    names = run("import apex, amp_C")
    apex, amp_c = names["apex"], names["amp_C"]
    assert hasattr(apex, "optimizers")
    assert not hasattr(apex, "mlp")
    assert hasattr(amp_c, "multi_tensor_axpby")
    assert getattr(amp_c, "multi_tensor_adam_fp8", None) is None
    assert "multi_tensor_scale" in amp_c.__dict__


# Guards as programs write them: what the guarded block imports, and what is done where it does.
# Megatron-Core's guard of a bare `import apex` is in import_lines.txt.
GUARDS = {
    "norm and scale": (
        "from apex.multi_tensor_apply import multi_tensor_applier\n"
        "from amp_C import multi_tensor_l2norm, multi_tensor_scale",
        "flag = torch.zeros(1, dtype=torch.int32)\n"
        "norm, _ = multi_tensor_applier(multi_tensor_l2norm, flag, [[x]], False)\n"
        "multi_tensor_applier(multi_tensor_scale, flag, [[x], [x]], 1.0 / norm.item())",
    ),
    "a norm with a flag of two dimensions": (
        "from amp_C import multi_tensor_l2norm",
        "flag = torch.zeros((1, 1), dtype=torch.int)\n"
        "multi_tensor_l2norm(65536, flag, [[x]], False)[0].item()",
    ),
    "hysteresis": (
        "import amp_C",
        "i = [torch.ones(1, dtype=torch.int32) for _ in range(2)]\n"
        "amp_C.update_scale_hysteresis(x[:1].clone(), *i, torch.zeros(1), 2.0, 0.5, 10, 1)",
    ),
    "flatten": (
        "from apex_C import flatten, unflatten",
        "assert torch.equal(unflatten(flatten([x, x]), [x, x])[1], x)",
    ),
    "a native Adam": (
        "import fused_adam_cuda",
        "fused_adam_cuda.adam",
    ),
    "an optimizer": (
        "from apex.optimizers import FusedAdam as Adam",
        "p = torch.nn.Parameter(x)\np.grad = x.clone()\nAdam([p], lr=0.1).step()",
    ),
    "layer normalization": (
        "from apex.normalization import FusedLayerNorm",
        "FusedLayerNorm(4)(x)",
    ),
    "layer normalization as a function": (
        "from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction",
        "FusedLayerNormAffineFunction.apply(x, torch.ones(4), torch.ones(4), (4,), 1e-5)",
    ),
    "persistent layer normalization": (
        "from apex.contrib.layer_norm.layer_norm import FastLayerNormFN",
        "FastLayerNormFN.apply(x.view(1, 4), torch.ones(4), torch.ones(4), 1e-5)",
    ),
    "cross entropy": (
        "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss",
        "SoftmaxCrossEntropyLoss.apply(x.view(1, 4), torch.tensor([1]))",
    ),
    "mixed precision with data parallelism": (
        "from apex import amp\nfrom apex.parallel import DistributedDataParallel as ApexDDP",
        "amp.initialize, ApexDDP",
    ),
    "the parallel toolkit": (
        "from apex.transformer import parallel_state",
        "parallel_state.initialize_model_parallel",
    ),
    "sharded Adam": (
        "from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam",
        "DistributedFusedAdam",
    ),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_finds_what_works_or_nothing(guard: str) -> None:
    imports, use = GUARDS[guard]
    statements = (
        "import torch\n"
        "x = torch.arange(1.0, 5.0)\n"
        "try:\n"
        f"    exec({imports!r})\n"
        "    found = True\n"
        "except ImportError:\n"
        "    found = False\n"
        "if found:\n"
        f"    exec({use!r})\n"
    )
    names = run(statements)
    there = {"norm and scale", "a norm with a flag of two dimensions", "hysteresis", "flatten"}
    assert names["found"] or guard not in there | {"an optimizer"}


FUNCTIONS = {
    "apex.normalization.fused_layer_norm": {
        *("FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction"),
        *("FusedLayerNormFunction", "FusedRMSNormAffineFunction"),
        *("FusedRMSNormAffineMixedDtypesFunction", "FusedRMSNormFunction"),
    },
    "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN"},
    "apex.contrib.xentropy.softmax_xentropy": {"SoftmaxCrossEntropyLoss"},
}


@pytest.mark.parametrize("module", FUNCTIONS)
def test_arguments_can_be_looked_up_in_forward(module: str) -> None:
    """As Megatron-Core does before it passes one that an older apex lacks."""
    for name in FUNCTIONS[module]:
        function = getattr(importlib.import_module(module), name)
        context, *arguments = inspect.getfullargspec(function.forward).args
        assert context == "ctx"
        last = "half_to_float" if name == "SoftmaxCrossEntropyLoss" else "memory_efficient"
        assert arguments[-1] == last


def test_without_importlibs_functions_python_says_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_alias, "_IMPORTLIB", {})
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'apex.mlp'$") as caught:
        run("import apex.mlp")
    assert caught.value.name == "apex.mlp"
    with pytest.raises(ImportError, match=r"^cannot import name 'mlp' from 'apex'"):
        run("from apex import mlp")
