# SPDX-License-Identifier: BSD-3-Clause
"""Layer and RMS normalization: values and gradients by torch's formula in fp64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torchfuse.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
    fused_rms_norm,
)

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
#: Of results that are rounded once to a dtype, relative to their size or 1.
TOLERANCE = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2, F64: 1e-12}
CLASSES = [FusedLayerNorm, FusedRMSNorm]


def reference(module: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients in fp64."""
    rms = isinstance(module, FusedRMSNorm)
    leaves = {"x": x.double().detach().requires_grad_()}
    for name, parameter in module.named_parameters():
        leaves[name] = parameter.detach().double().requires_grad_()
    if rms:
        y = functional.rms_norm(
            leaves["x"], module.normalized_shape, leaves.get("weight"), module.eps
        )
    else:
        y = functional.layer_norm(
            leaves["x"],
            module.normalized_shape,
            leaves.get("weight"),
            leaves.get("bias"),
            module.eps,
        )
    grads = torch.autograd.grad(y, list(leaves.values()), dy.double())
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def run(module: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    leaves = {"x": x, **dict(module.named_parameters())}
    grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], factor: float = 1.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        scale = expected[name].abs().clamp_min(1.0)
        if name in ("weight", "bias"):
            # Sums over rows of numbers that were rounded to the output's dtype.
            scale = scale + expected[name].abs().max()
        error = ((tensor.double() - expected[name]).abs() / scale).max().item()
        assert error <= TOLERANCE[tensor.dtype] * factor, (name, error)


def problem(
    cls: Any, shape: tuple[int, ...], dims: int, x_dtype: torch.dtype, **options: Any
) -> Any:
    torch.manual_seed(0)
    module = cls(shape[-dims:], **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape).to(parameter.dtype))
    x = (torch.randn(shape, dtype=F64) * 2 + 0.5).to(x_dtype)
    dy = torch.randn(shape, dtype=F64).to(x_dtype)
    return module, x, dy


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("dtype", "params", "options"),
    [
        (F32, F32, {}),
        (F64, F64, {"elementwise_affine": False}),
        (F16, F16, {}),
        (BF16, F32, {}),
        (F32, F32, {"memory_efficient": True}),
        (BF16, BF16, {"memory_efficient": True}),
    ],
)
def test_values_and_gradients(
    cls: Any, dtype: torch.dtype, params: torch.dtype, options: dict[str, Any]
) -> None:
    """Rows of one and of two dimensions, and more than one thread takes at once."""
    factor = 16.0 if options.get("memory_efficient") else 1.0
    for shape, dims in (((3, 5, 33), 2), ((1101, 130), 1)):
        module, x, dy = problem(cls, shape, dims, dtype, dtype=params, **options)
        found = run(module, x, dy)
        assert found["y"].dtype == dtype
        assert_near(found, reference(module, x, dy), factor)


def test_a_layer_may_have_no_bias() -> None:
    module, x, dy = problem(FusedLayerNorm, (4, 6), 1, F32, bias=False)
    assert module.bias is None
    assert_near(run(module, x, dy), reference(module, x, dy))


@pytest.mark.parametrize(
    ("cls", "dtype", "weight_dtype"),
    [
        (MixedFusedLayerNorm, F16, F32),
        (MixedFusedRMSNorm, BF16, F16),
        (MixedFusedRMSNorm, F32, F32),
    ],
)
def test_mixed_modules_give_the_weights_dtype(
    cls: Any, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    module, x, dy = problem(cls, (6, 40), 1, dtype, dtype=weight_dtype)
    # The gradient of an output that was cast is rounded to the input's dtype on its way.
    dy = dy.to(weight_dtype).to(dtype)
    found = run(module, x, dy)
    assert found["y"].dtype == weight_dtype
    assert_near(found, reference(module, x, dy), factor=4.0)


@pytest.mark.parametrize("cls", CLASSES)
def test_memory_efficient_keeps_the_output_alone(cls: Any) -> None:
    module, x, _ = problem(cls, (9, 65), 1, F32, memory_efficient=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x.requires_grad_())
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
    assert y.untyped_storage().data_ptr() in storages
    assert x.untyped_storage().data_ptr() not in storages


def test_autocast_converts_fp32_inputs_and_outputs_of_fp32_weights() -> None:
    module, x, _ = problem(FusedLayerNorm, (4, 6), 1, F32)
    with torch.autocast("cpu", dtype=BF16):
        y = module(x)
        mixed = [kind(6)(x).dtype for kind in (MixedFusedLayerNorm, MixedFusedRMSNorm)]
        assert MixedFusedLayerNorm(6, dtype=F64)(x).dtype == F64
    assert y.dtype == BF16
    assert torch.equal(y, module(x.bfloat16()))
    assert mixed == [BF16, BF16]


def test_functions_without_parameters() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(fused_layer_norm(x, 8), functional.layer_norm(x, (8,), eps=1e-6))
    torch.testing.assert_close(fused_rms_norm(x, (8,)), functional.rms_norm(x, (8,), eps=1e-6))


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize(
    ("cls", "columns", "dtype", "out"),
    [
        (MixedFusedLayerNorm, 1024, F32, F32),
        (MixedFusedRMSNorm, 1072, BF16, BF16),
        (MixedFusedLayerNorm, 1049, F16, F32),
    ],
)
def test_rows_of_a_large_tensor_are_those_of_small_ones(
    cls: Any, columns: int, dtype: torch.dtype, out: torch.dtype, memory_efficient: bool
) -> None:
    """Large results go past the caches on the CPU, where rows are whole lines of them."""
    torch.manual_seed(0)
    module = cls(columns, dtype=out, memory_efficient=memory_efficient)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0, 0.2)
    x, dy = torch.randn(1101, columns).to(dtype), torch.randn(1101, columns).to(out)
    whole = run(module, x, dy)
    # 64 rows are what gradients of weight and bias are summed over, and one thread takes them.
    parts = [run(module, *part) for part in zip(x.split(64), dy.split(64), strict=True)]
    for key in ("y", "x"):
        assert torch.equal(whole[key], torch.cat([part[key] for part in parts]))
    for name, _ in module.named_parameters():
        total = sum(part[name].double() for part in parts)
        error = (whole[name].double() - total).norm() / total.norm()
        assert error < 4 * TOLERANCE[out]
    torch.set_num_threads(1)
    for name, tensor in run(module, x, dy).items():
        assert torch.equal(whole[name], tensor), "bits depend on threads"


@pytest.mark.parametrize("cls", CLASSES)
def test_gradients_of_gradients(cls: Any) -> None:
    module, x, _ = problem(cls, (3, 5), 1, F64, dtype=F64)
    leaves = (x.requires_grad_(), *module.parameters())

    def function(*tensors: Tensor) -> Any:
        named = dict(zip([name for name, _ in module.named_parameters()], tensors[1:], strict=True))
        return torch.func.functional_call(module, named, (tensors[0],))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_no_gradients_of_gradients_without_the_input() -> None:
    module, x, dy = problem(FusedLayerNorm, (3, 5), 1, F32, memory_efficient=True)
    y = module(x.requires_grad_())
    with pytest.raises(
        RuntimeError, match=r"FusedLayerNorm: expected memory_efficient to be false"
    ):
        torch.autograd.grad(y, x, dy, create_graph=True)


@pytest.mark.parametrize("cls", CLASSES)
def test_strided_inputs_and_gradients(cls: Any) -> None:
    module, x, dy = problem(cls, (6, 4, 8), 1, F32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    expanded = dy[:1].expand(6, 4, 8)
    assert not strided.is_contiguous()
    assert_near(run(module, strided, expanded), reference(module, x, expanded))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty_inputs(cls: Any, shape: tuple[int, ...]) -> None:
    module = cls(shape[-1])
    x = torch.zeros(shape, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    assert torch.equal(module.weight.grad, torch.zeros(shape[-1]))


@pytest.mark.parametrize(
    ("ours", "torchs"), [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)]
)
def test_states_are_torchs(ours: Any, torchs: Any) -> None:
    module, x, _ = problem(ours, (4, 6), 1, F32)
    twin = torchs(6, eps=module.eps)
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), twin(x))
    module.load_state_dict(twin.state_dict())
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x), module(x))


def test_transforms_and_forward_mode() -> None:
    module, x, dy = problem(FusedLayerNorm, (4, 6), 1, F64, dtype=F64)
    rows = torch.func.vmap(module)(x)
    torch.testing.assert_close(rows, module(x))
    _, tangent = torch.func.jvp(module, (x,), (dy,))
    _, expected = torch.func.jvp(
        lambda t: functional.layer_norm(t, (6,), module.weight, module.bias, module.eps),
        (x,),
        (dy,),
    )
    torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize(
    ("cls", "memory_efficient"), [(FusedLayerNorm, True), (MixedFusedRMSNorm, False)]
)
def test_it_compiles_into_one_graph(cls: Any, memory_efficient: bool) -> None:
    module, x, dy = problem(cls, (4, 6), 1, F32, memory_efficient=memory_efficient)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for found, eager in zip(
        run(compiled, x, dy).values(), run(module, x, dy).values(), strict=True
    ):
        assert torch.equal(found, eager)


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm])
def test_modules_on_the_meta_device(kind: Any) -> None:
    output = kind(4, device="meta")(torch.empty(2, 4, device="meta"))
    assert output.shape == (2, 4)
    assert output.device.type == "meta"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: FusedLayerNorm(8)(torch.zeros(2, 7)),
            ValueError,
            r"FusedLayerNorm: expected input to end in the dimensions normalized_shape=\[8\], "
            r"got an input of shape \[2, 7\]",
        ),
        (
            lambda: FusedRMSNorm((2, 8))(torch.zeros(8)),
            ValueError,
            r"FusedRMSNorm: expected input to end in the dimensions normalized_shape=\[2, 8\]",
        ),
        (
            lambda: FusedLayerNorm(8)(torch.zeros(2, 8, dtype=torch.int64)),
            RuntimeError,
            r"FusedLayerNorm: expected input to be of dtype",
        ),
        (
            lambda: FusedLayerNorm(8, affine=True),
            TypeError,
            r"FusedLayerNorm\.__init__\(\) got an unexpected keyword argument 'affine'",
        ),
        (
            lambda: MixedFusedLayerNorm(8, elementwise_affine=False),
            RuntimeError,
            r"MixedFusedLayerNorm: expected elementwise_affine to be True, got False\. "
            r"Use FusedLayerNorm\.",
        ),
        (
            lambda: torch.ops.torchfuse.layer_norm(
                torch.zeros(2, 8), 1, torch.zeros(7), None, eps=1e-5
            ),
            RuntimeError,
            r"layer_norm: expected weight to be of shape \[8\], the last dimensions of input, "
            r"got \[7\]",
        ),
        (
            lambda: torch.ops.torchfuse.layer_norm(torch.zeros(2, 8), 3, eps=1e-5),
            RuntimeError,
            r"layer_norm: expected normalized_dims to be from 1 to 2, the input's dim",
        ),
        (
            lambda: torch.ops.torchfuse.layer_norm(torch.zeros(2, 8), 1, eps=1e-5, dtype=F16),
            RuntimeError,
            r"layer_norm: expected dtype to be Float, the input's, or Float, got Half",
        ),
    ],
)
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
