# SPDX-License-Identifier: BSD-3-Clause
"""apex's functions and native modules of normalization, cross entropy and flat tensors."""

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

from torchfuse.apex.native import fused_layer_norm_cuda, syncbn, xentropy_cuda
from torchfuse.apex.native.apex_c import flatten, unflatten

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


# Native modules.

CHANNELS = 5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.manual_seed(seed))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# fused_layer_norm_cuda.


@pytest.mark.parametrize(
    ("affine", "memory_efficient"), [(False, True), (False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("rms", [False, True])
def test_norms(rms: bool, affine: bool, memory_efficient: bool) -> None:
    x, dy = randn(7, 3, 4), randn(7, 3, 4, seed=1)
    weight, bias = randn(3, 4, seed=2) + 2.0, randn(3, 4, seed=3)
    parameters = ((weight,) if rms else (weight, bias)) if affine else ()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *parameters)]
    norm: Any = functional.rms_norm if rms else functional.layer_norm
    y = norm(leaves[0], (3, 4), *leaves[1:], eps=EPS)
    start, end = "rms_" if rms else "", "_affine" if affine else ""
    output, *statistics = getattr(fused_layer_norm_cuda, f"{start}forward{end}")(
        x, (3, 4), *parameters, EPS
    )
    close(output, y.detach())
    rows = x.flatten(1)
    if rms:
        close(statistics, [(rows.square().mean(1) + EPS).rsqrt()])
    else:
        close(statistics, [rows.mean(1), (rows.var(1, correction=0) + EPS).rsqrt()])
    found = getattr(fused_layer_norm_cuda, f"{start}backward{end}")(
        *(dy, *statistics, output if memory_efficient else x, (3, 4)),
        *(*parameters, EPS, memory_efficient),
    )
    close(found if affine else (found,), torch.autograd.grad(y, leaves, dy))


def test_mixed_norms_give_the_weights_dtype() -> None:
    x, weight, bias = randn(7, 4).bfloat16(), randn(4, seed=2), randn(4, seed=3)
    layer = fused_layer_norm_cuda.forward_affine_mixed_dtypes(x, (4,), weight, bias, EPS)[0]
    close(layer, functional.layer_norm(x.float(), (4,), weight, bias, EPS))
    rms = fused_layer_norm_cuda.rms_forward_affine_mixed_dtypes(x, (4,), weight, EPS)[0]
    close(rms, functional.rms_norm(x.float(), (4,), weight, EPS))


# syncbn: two processes with batches of different sizes, one after the other.


@pytest.mark.parametrize(
    ("affine", "dtype"), [(False, torch.float64), (True, torch.float32)], ids=str
)
@pytest.mark.parametrize("last", ["", "_c_last"], ids=["first", "last"])
def test_batch_norm_of_two_processes(last: str, affine: bool, dtype: torch.dtype) -> None:
    """Statistics of fp64 are fp64."""

    def call(name: str, *arguments: Any) -> Any:
        return getattr(syncbn, name + last)(*arguments)

    def placed(tensor: Tensor) -> Tensor:
        return tensor.movedim(1, -1).contiguous() if last else tensor

    x, dy = (randn(8, CHANNELS, 3, 4, seed=seed).to(dtype) + 1.0 for seed in range(2))
    weight, bias = (randn(CHANNELS, seed=2), randn(CHANNELS, seed=3)) if affine else (None, None)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    given: list[Any] = [*leaves, None, None]
    y = functional.batch_norm(given[0], None, None, given[1], given[2], True, eps=EPS)
    expected = torch.autograd.grad(y, leaves, dy)

    parts, grads = ([placed(part) for part in torch.split(whole, [3, 5])] for whole in (x, dy))
    own = [call("welford_mean_var", part) for part in parts]
    count = torch.tensor([3 * 12, 5 * 12], dtype=torch.int32)
    means, variances = (torch.stack(column) for column in zip(*own, strict=True))
    mean, variance, inv_std = syncbn.welford_parallel(means, variances, count, EPS)
    by_channel = x.transpose(0, 1).flatten(1)
    close((mean, variance), (by_channel.mean(1), by_channel.var(1)))
    forward = [mean, inv_std, weight, bias]
    middle, end = ([None], [False]) if last else ([], [])
    outputs = [call("batchnorm_forward", part, *middle, *forward, *end) for part in parts]
    close(torch.cat(outputs), placed(y.detach()))

    reduced = [
        call("reduce_bn", grad, part, mean, inv_std, weight)
        for grad, part in zip(grads, parts, strict=True)
    ]
    sums = [torch.stack(column).sum(0) for column in zip(*reduced, strict=True)]
    found = [
        call("batchnorm_backward", grad, part, mean, inv_std, weight, *sums[:2], count)
        for grad, part in zip(grads, parts, strict=True)
    ]
    close(torch.cat(found), placed(expected[0]))
    if affine:
        close((sums[2], sums[3]), expected[1:])
    else:
        assert sums[2].numel() == sums[3].numel() == 0


def test_a_relu_behind_a_residual() -> None:
    x, z, dy = (randn(6, 3, CHANNELS, seed=seed) for seed in range(3))
    mean, inv_std = randn(CHANNELS, seed=3), randn(CHANNELS, seed=4).abs() + 0.5
    weight, bias = randn(CHANNELS, seed=5), randn(CHANNELS, seed=6)
    before = (x - mean) * inv_std * weight + bias + z
    numbers = (mean, inv_std, weight, bias)
    close(syncbn.batchnorm_forward_c_last(x, z, *numbers, True), before.relu())
    close(syncbn.relu_bw_c_last(dy, x, z, *numbers), dy * (before > 0))


# xentropy_cuda.


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing: float) -> None:
    logits, labels = randn(4, 6) * 3.0, torch.tensor([1, 5, 0, 3])
    leaf, grad = logits.clone().requires_grad_(), randn(4, seed=1)
    losses = functional.cross_entropy(leaf, labels, reduction="none", label_smoothing=smoothing)
    found, logsumexp = xentropy_cuda.forward(logits, labels, smoothing, False)
    close(found, losses.detach())
    close(logsumexp, logits.logsumexp(1))
    back = xentropy_cuda.backward(grad, logits, logsumexp, labels, smoothing)
    close(back, torch.autograd.grad(losses, leaf, grad)[0])
    wide, _ = xentropy_cuda.forward(logits.bfloat16(), labels, smoothing, True)
    assert wide.dtype == torch.float32


# apex_C: many tensors in one, and views into it.


def test_a_flat_tensor_has_all_elements_in_logical_order(device: str) -> None:
    parts = [
        torch.arange(6, device=device).view(2, 3),
        torch.arange(6, 12, device=device).view(3, 2).t(),
        torch.empty(0, 5, device=device, dtype=torch.int64),
        torch.full((), 12, device=device),
    ]
    flat = flatten(tuple(parts))
    assert flat.dtype == torch.int64
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 10, 7, 9, 11, 12]
    views = unflatten(flat, parts)
    assert isinstance(views, list)
    for view, part in zip(views, parts, strict=True):
        assert torch.equal(view, part)
    views[1].fill_(-1)
    assert (flat == -1).sum() == 6
    assert not (parts[1] == -1).any()


def test_one_tensor_is_copied_and_none_are_an_empty_tensor() -> None:
    tensor = torch.ones(3)
    flatten([tensor]).zero_()
    assert tensor.tolist() == [1.0] * 3
    flat = flatten([])
    assert flat.shape == (0,)
    assert unflatten(flat, []) == []


def test_gradients_pass_through() -> None:
    tensors = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    flatten(tensors).mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert [tensor.grad.tolist() for tensor in tensors if tensor.grad is not None] == [
        *([1.0, 2.0], [3.0])
    ]


def test_tensors_that_do_not_match_are_refused() -> None:
    ones = torch.ones(2)
    refused: list[tuple[Any, type[Exception], str]] = [
        (1.0, TypeError, r"tensors\[1\] to be a tensor, got float"),
        (ones.half(), ValueError, r"tensors\[1\] to have the dtype of tensors\[0\], torch.float32"),
        (ones.to("meta"), ValueError, r"tensors\[1\] to have the device of tensors\[0\], cpu, got"),
    ]
    for other, error, message in refused:
        with pytest.raises(error, match=f"^flatten: expected {message}"):
            flatten([ones, other])
    for flat in (torch.ones(3), torch.ones(4, 1), torch.ones(8)[::2]):
        with pytest.raises(ValueError, match=r"^unflatten: expected flat_tensor to be contig"):
            unflatten(flat, [ones, ones])
    with pytest.raises(TypeError, match=r"^unflatten: expected tensors\[0\] to be a tensor, got i"):
        unflatten(torch.ones(4), [4])  # type: ignore[list-item]
