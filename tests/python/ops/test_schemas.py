# SPDX-License-Identifier: BSD-3-Clause
"""All operators come from one schema file, have the kernels they need, and match their wrappers.

The operator of an optimizer has a common form, which its entry in torchfuse.testing.optim_specs
implies; all others are listed here.
"""

from __future__ import annotations

import inspect

import pytest
import torch

import torchfuse
from torchfuse import _loader
from torchfuse.testing import OPTIM_SPECS

WRAPPED = ("fused_adam_", "multi_tensor_unscale_", "multi_tensor_l2_norm", "amp_update_scale_")
# What modules and functions consist of, which are the wrappers.
PARTS = (
    "all_reduce_sum_",
    "batch_norm_stats",
    "batch_norm_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
    "sync_batch_norm",
    "layer_norm_forward",
    "layer_norm_backward",
    "layer_norm",
    "softmax_cross_entropy_forward",
    "softmax_cross_entropy_backward",
    "softmax_cross_entropy",
)
# Traced as what they consist of.
COMPOSITES = ("layer_norm", "softmax_cross_entropy", "sync_batch_norm")

OPTIMIZER_OPS = {spec.op: spec for spec in OPTIM_SPECS}
ALL = sorted({*WRAPPED, *PARTS, *OPTIMIZER_OPS})


def registered() -> dict[str, torch.FunctionSchema]:
    return {
        schema.name.removeprefix("torchfuse::"): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("torchfuse::")
    }


def test_the_registered_operators_are_the_expected_ones() -> None:
    assert sorted(registered()) == ALL


@pytest.mark.parametrize("name", OPTIMIZER_OPS)
def test_an_optimizers_operator_has_the_common_form(name: str) -> None:
    """Lists of tensors, all but the gradients written; hyper-parameters; what a scaler asks."""
    native = torchfuse._C.FusedStep(OPTIMIZER_OPS[name].algorithm)
    arguments = registered()[name].arguments
    lists = [argument for argument in arguments if not argument.kwarg_only]
    written = [argument.name for argument in lists if argument.is_write]
    states = [f"{state}s" for state in native.state_names]
    assert [a.name for a in lists] == ["params", "grads", *states, "state_steps", "master_params"]
    assert written == ["params", *states, "state_steps", "master_params"]
    assert all(str(argument.type) == "List[Tensor]" for argument in lists)
    keywords = {argument.name: argument for argument in arguments if argument.kwarg_only}
    common = {"lr_tensor", "grad_scale", "found_inf"}
    table = torchfuse._C.hyper_params_of(OPTIMIZER_OPS[name].algorithm)
    assert [key for key in keywords if key not in common] == [name for name, *_ in table]
    flags = {key for key, argument in keywords.items() if str(argument.type) == "bool"}
    assert flags == {name for name, is_flag, *_ in table if is_flag}
    assert all(keywords[key].default_value is None for key in common)
    assert not registered()[name].returns


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("key", ["CPU", "CUDA", "Meta"])
def test_every_operator_has_a_kernel(name: str, key: str) -> None:
    """CUDA also in a CPU-only build, where the kernel says how to rebuild."""
    if name in COMPOSITES:
        key = "CompositeImplicitAutograd"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"torchfuse::{name}", key)


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapper_has_the_schemas_arguments(name: str) -> None:
    wrapper = getattr(torchfuse.ops, name)
    assert wrapper.__doc__, "undocumented"
    parameters = inspect.signature(wrapper).parameters.values()
    arguments = registered()[name].arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        default = None if parameter.default is parameter.empty else parameter.default
        assert default == argument.default_value, argument.name
        assert f"{argument.name} (" in wrapper.__doc__, f"{argument.name} is undocumented"


@pytest.mark.skipif(_loader.recorded_build()["cuda"] != "", reason="about builds without CUDA")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA tensor needs a CUDA device")
def test_cuda_tensors_in_a_cpu_build_say_how_to_rebuild() -> None:
    with pytest.raises(RuntimeError, match=r"built without CUDA.*TORCHFUSE_WITH_CUDA=ON"):
        torch.ops.torchfuse.multi_tensor_l2_norm([torch.ones(2, device="cuda")])
