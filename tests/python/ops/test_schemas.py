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
from torchfuse.testing import OPTIM_SPECS

EXPECTED = {
    "fused_adam_": (
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps, Tensor(f!)[] master_params, *, "
        "float lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad=False, "
        "bool maximize=False, bool adam_w_mode=True, bool bias_correction=True, "
        "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
    ),
    "multi_tensor_unscale_": (
        "(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inv_scale) -> ()"
    ),
    "multi_tensor_l2_norm": "(Tensor[] tensors) -> (Tensor norm, Tensor found_inf)",
    "amp_update_scale_": (
        "(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor found_inf, *, float growth_factor, "
        "float backoff_factor, int growth_interval, Tensor(c!)? hysteresis_tracker=None, "
        "int hysteresis=1, float? min_scale=None, float? max_scale=None, bool dynamic=True, "
        "Tensor(d!)? counts=None, Tensor(e!)? history=None) -> ()"
    ),
}

# What modules and functions consist of, which are the wrappers.
PARTS = {
    "all_reduce_sum_": (
        "(Tensor(a!) tensor, str group, str caller, bool deterministic=False) -> ()"
    ),
    "batch_norm_stats": "(Tensor input) -> Tensor",
    "batch_norm_elemt": (
        "(Tensor input, Tensor? weight, Tensor? bias, Tensor? packed, Tensor(a!)? running_mean, "
        "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, Tensor? residual, *, "
        "float? momentum, float eps, bool relu=False) -> (Tensor output, Tensor saved)"
    ),
    "batch_norm_backward_reduce": (
        "(Tensor grad_output, Tensor input, Tensor saved, Tensor? weight, Tensor? bias, "
        "Tensor? output, *, bool relu=False) "
        "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias, Tensor grad_residual)"
    ),
    "batch_norm_backward_elemt": (
        "(Tensor grad_output, Tensor input, Tensor saved, Tensor sums, Tensor? weight, "
        "Tensor? bias, *, bool relu=False) -> Tensor"
    ),
    "sync_batch_norm": (
        "(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
        "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, Tensor? residual=None, "
        "Tensor? packed=None, *, bool training, float? momentum, float eps, bool relu=False, "
        'str? group=None, str caller="sync_batch_norm", bool deterministic=False) '
        "-> (Tensor output, Tensor packed)"
    ),
    "layer_norm_forward": (
        "(Tensor input, int normalized_dims, Tensor? weight, Tensor? bias, *, float eps, "
        "bool rms=False, ScalarType? dtype=None) -> (Tensor output, Tensor mean, Tensor rstd)"
    ),
    "layer_norm_backward": (
        "(Tensor grad_output, Tensor source, int normalized_dims, Tensor? mean, Tensor rstd, "
        "Tensor? weight, Tensor? bias, *, bool rms=False, bool from_output=False, "
        "ScalarType? dtype=None, bool[3] output_mask=[True, True, True]) "
        "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
    ),
    "layer_norm": (
        "(Tensor input, int normalized_dims, Tensor? weight=None, Tensor? bias=None, *, "
        "float eps, bool rms=False, ScalarType? dtype=None, bool memory_efficient=False, "
        'str caller="layer_norm") -> Tensor'
    ),
    "softmax_cross_entropy_forward": (
        "(Tensor logits, Tensor labels, *, float smoothing=0.0, int? ignore_index=None, "
        "ScalarType? dtype=None) -> (Tensor losses, Tensor log_sum_exp, Tensor rest)"
    ),
    "softmax_cross_entropy_backward": (
        "(Tensor grad_losses, Tensor logits, Tensor log_sum_exp, Tensor labels, *, "
        "float smoothing=0.0, int? ignore_index=None, Tensor? rest=None) -> Tensor"
    ),
    "softmax_cross_entropy": (
        "(Tensor logits, Tensor labels, *, float smoothing=0.0, int? ignore_index=None, "
        "ScalarType? dtype=None) -> Tensor"
    ),
}
# Traced as what they consist of.
COMPOSITES = ("layer_norm", "softmax_cross_entropy", "sync_batch_norm")

OPTIMIZER_OPS = {spec.op: spec for spec in OPTIM_SPECS}
ALL = sorted({*EXPECTED, *PARTS, *OPTIMIZER_OPS})


def registered() -> dict[str, torch.FunctionSchema]:
    return {
        schema.name.removeprefix("torchfuse::"): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("torchfuse::")
    }


def test_the_registered_operators_are_the_expected_ones() -> None:
    assert sorted(registered()) == ALL


@pytest.mark.parametrize("name", {**EXPECTED, **PARTS})
def test_schema(name: str) -> None:
    parsed = torch._C.parse_schema(f"torchfuse::{name}{ {**EXPECTED, **PARTS}[name] }")
    assert str(registered()[name]) == str(parsed)


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
    assert flags == {name for name, is_flag, _ in table if is_flag}
    assert all(keywords[key].default_value is None for key in common)
    assert not registered()[name].returns


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("key", ["CPU", "CUDA", "Meta"])
def test_every_operator_has_a_kernel(name: str, key: str) -> None:
    """CUDA also in a CPU-only build, where the kernel says how to rebuild."""
    if name in COMPOSITES:
        key = "CompositeImplicitAutograd"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"torchfuse::{name}", key)


@pytest.mark.parametrize("name", EXPECTED)
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
        assert f"{argument.name}:" in wrapper.__doc__, f"{argument.name} is undocumented"


@pytest.mark.skipif(torchfuse._C.build_info()["cuda"] != "", reason="about builds without CUDA")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA tensor needs a CUDA device")
def test_cuda_tensors_in_a_cpu_build_say_how_to_rebuild() -> None:
    with pytest.raises(RuntimeError, match=r"built without CUDA.*TORCHFUSE_WITH_CUDA=ON"):
        torch.ops.torchfuse.multi_tensor_l2_norm([torch.ones(2, device="cuda")])
