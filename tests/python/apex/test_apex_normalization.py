# SPDX-License-Identifier: BSD-3-Clause
"""The functions of apex.normalization and apex.contrib by their names, against torch's formulas."""

from __future__ import annotations

import importlib
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-4
SHAPE = (3, 4)
WEIGHT, BIAS = (torch.randn(SHAPE, generator=torch.manual_seed(seed)) for seed in (1, 2))
Formula = Callable[[Tensor], Tensor]


layer = partial(functional.layer_norm, normalized_shape=SHAPE, weight=WEIGHT, bias=BIAS, eps=EPS)
plain_layer = partial(functional.layer_norm, normalized_shape=SHAPE, eps=EPS)
rms = partial(functional.rms_norm, normalized_shape=SHAPE, weight=WEIGHT, eps=EPS)
plain_rms = partial(functional.rms_norm, normalized_shape=SHAPE, eps=EPS)
BOTH, ONE = (WEIGHT, BIAS, SHAPE, EPS), (WEIGHT, SHAPE, EPS)
#: By name: arguments behind the input, and what it computes.
FUNCTIONS: dict[str, tuple[tuple[Any, ...], Formula]] = {
    "fused_layer_norm_affine": (BOTH, layer),
    "fused_layer_norm": ((SHAPE, EPS), plain_layer),
    "fused_rms_norm_affine": (ONE, rms),
    "fused_rms_norm": ((SHAPE, EPS), plain_rms),
    "mixed_dtype_fused_layer_norm_affine": (BOTH, layer),
    "mixed_dtype_fused_rms_norm_affine": (ONE, rms),
    "manual_rms_norm": ((SHAPE, WEIGHT, EPS), rms),
    "FusedLayerNormAffineFunction": (BOTH, layer),
    "FusedLayerNormAffineMixedDtypesFunction": (BOTH, layer),
    "FusedLayerNormFunction": ((SHAPE, EPS), plain_layer),
    "FusedRMSNormAffineFunction": (ONE, rms),
    "FusedRMSNormAffineMixedDtypesFunction": (ONE, rms),
    "FusedRMSNormFunction": ((SHAPE, EPS), plain_rms),
}


def check(function: Callable[..., Tensor], arguments: tuple[Any, ...], formula: Formula) -> None:
    """Output and gradient of the input."""
    x, other = (torch.randn(5, *SHAPE, generator=torch.manual_seed(3)) for _ in range(2))
    dy = torch.randn(5, *SHAPE, generator=torch.manual_seed(4))
    found, expected = function(x.requires_grad_(), *arguments), formula(other.requires_grad_())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for output in (found, expected):
        output.backward(dy)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-5)


def check_forward(function: Any, last: str) -> None:
    """Megatron-Core looks for an argument before it passes one that an older apex lacks."""
    context, *arguments = inspect.getfullargspec(function.forward).args
    assert (context, arguments[-1]) == ("ctx", last)


@pytest.fixture
def fused(installed: None) -> Any:
    return importlib.import_module("apex.normalization.fused_layer_norm")


def call_of(function: Any) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(function, "apply", function)
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_apex(fused: Any, name: str) -> None:
    function, (arguments, formula) = getattr(fused, name), FUNCTIONS[name]
    assert pickle.loads(pickle.dumps(function)) is function
    if name.endswith("Function"):
        check_forward(function, "memory_efficient")
    check(call_of(function), arguments, formula)
    if name != "manual_rms_norm":
        for memory_efficient in (False, True):
            check(call_of(function), (*arguments, memory_efficient), formula)
    if "mixed" in name.lower():  # they give the weights' dtype
        x = torch.randn(5, *SHAPE, dtype=torch.bfloat16)
        output = call_of(function)(x, *arguments)
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, formula(x.float()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_apex_cast_under_autocast(fused: Any, name: str) -> None:
    """Its `autograd.Function`s and `manual_rms_norm` do not."""
    call, (arguments, _) = call_of(getattr(fused, name)), FUNCTIONS[name]
    x = torch.randn(5, *SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        output = call(x, *arguments)
        wide = call(x.double(), *arguments)
    if not name.startswith(("fused", "mixed")):
        assert torch.equal(output, call(x, *arguments))
        return
    short = [a.bfloat16() if isinstance(a, Tensor) else a for a in (x, *arguments)]
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, call(*short))
    assert wide.dtype == (torch.bfloat16 if name.startswith("mixed") else torch.float64)


def apex_rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """The formula of apex's manual_rms_norm, in its dtypes."""
    variance = x.to(torch.float32).pow(2).mean((-2, -1), keepdim=True)
    normalized = x * torch.rsqrt(variance + EPS)
    if weight is None:
        return normalized
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalized = normalized.to(weight.dtype)
    return weight * normalized


@pytest.mark.parametrize("weight", [None, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_manual_rms_norm_gives_the_dtype_of_apex(
    fused: Any, dtype: torch.dtype, weight: torch.dtype | None
) -> None:
    x, gamma = torch.randn(5, *SHAPE).to(dtype), None if weight is None else WEIGHT.to(weight)
    found, expected = fused.manual_rms_norm(x, SHAPE, gamma, EPS), apex_rms_norm(x, gamma)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_contrib_layer_norm(installed: None) -> None:
    module = importlib.import_module("apex.contrib.layer_norm.layer_norm")
    weight, bias = WEIGHT[0], BIAS[0]
    formula = partial(
        functional.layer_norm, normalized_shape=(4,), weight=weight, bias=bias, eps=EPS
    )
    made = module.FastLayerNorm(4, EPS)
    assert made.epsilon == EPS
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(bias)
    check(made, (), formula)
    check(module.FastLayerNormFN.apply, (weight, bias, EPS), formula)
    check_forward(module.FastLayerNormFN, "memory_efficient")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_contrib_cross_entropy(installed: None, smoothing: float) -> None:
    """Row 2 has the label that does not count, 0 unless another is given."""
    kind = importlib.import_module("apex.contrib.xentropy").SoftmaxCrossEntropyLoss
    check_forward(kind, "half_to_float")
    logits, other = (torch.randn(4, 6, generator=torch.manual_seed(5)) for _ in range(2))
    labels = torch.tensor([1, 5, 0, 3])
    found = kind.apply(logits.requires_grad_(), labels, smoothing)
    expected = functional.cross_entropy(
        other.requires_grad_(), labels, reduction="none", label_smoothing=smoothing, ignore_index=0
    )
    torch.testing.assert_close(found, expected)
    assert found[2] == 0
    for losses in (found, expected):
        losses.sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)
    assert torch.equal(kind()(logits, labels, smoothing, 5)[1], torch.zeros(()))
    narrow = kind.apply(logits.detach().bfloat16(), labels, smoothing, 0, True)
    assert narrow.dtype == torch.float32
