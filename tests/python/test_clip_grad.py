# SPDX-License-Identifier: BSD-3-Clause
"""Clipping against torch.nn.utils and the same formula in fp64."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

from torchfuse import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torchfuse.testing import assert_bitwise_equal

INF = math.inf
SHAPES = [(37, 5), (1,), (129,), (2, 3, 5, 7)]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: Units in the last place, of half each, that two ways to round may lie apart.
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


def with_grad(grad: Any, dtype: torch.dtype = torch.float32) -> Parameter:
    grad = grad if isinstance(grad, Tensor) else torch.tensor(grad, dtype=dtype)
    param = Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad
    return param


def problem(dtypes: Sequence[torch.dtype], magnitude: float = 1.0) -> list[Parameter]:
    """One parameter per shape, of the dtypes in turn, and one without a gradient."""
    generator = torch.Generator().manual_seed(5)
    params = []
    for shape, dtype in zip(SHAPES, itertools.cycle(dtypes)):
        params.append(with_grad((torch.randn(shape, generator=generator) * magnitude).to(dtype)))
    return [*params, Parameter(torch.ones(2))]


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def exact_norm(grads: Sequence[Tensor], norm_type: float) -> float:
    """In fp64, of all elements as one vector; p = 0 as torch counts."""
    if norm_type == 0:
        return float(sum(bool(grad.any()) for grad in grads))
    every = torch.cat([grad.double().reshape(-1) for grad in grads])
    return float(torch.linalg.vector_norm(every, norm_type))


# Values.


def test_signatures_are_torchs() -> None:
    for ours in (clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm):
        theirs = inspect.signature(getattr(torch.nn.utils, ours.__name__))
        mine = inspect.signature(ours)
        assert [(p.name, p.default) for p in mine.parameters.values()] == [
            (p.name, p.default) for p in theirs.parameters.values()
        ]


MIXES = [*[(dtype,) for dtype in DTYPES], DTYPES]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 3.0, 0.5, 0, -1.0, -INF])
@pytest.mark.parametrize("max_norm", [0.0, 0.7, 1e6, INF])
@pytest.mark.parametrize("dtypes", MIXES, ids=lambda d: "-".join(str(x)[6:] for x in d))
def test_equals_fp64_and_torch(
    norm_type: float, max_norm: float, dtypes: Sequence[torch.dtype]
) -> None:
    params = problem(dtypes)
    before = [grad.clone() for grad in grads_of(params)]
    exact = exact_norm(before, norm_type)
    norm = clip_grad_norm_(params, max_norm, norm_type)
    wide = torch.float64 in dtypes
    assert norm.shape == ()
    assert norm.dtype == (torch.float64 if wide else torch.float32)
    # Of fp32 norms of parts, unless all is fp64.
    assert float(norm) == pytest.approx(exact, rel=1e-13 if dtypes == (torch.float64,) else 3e-6)
    coefficient = min(1.0, max_norm / (exact + 1e-6))
    for grad, former in zip(grads_of(params), before, strict=True):
        expected = former.double() * coefficient
        tolerance = {"rtol": 1e-12 if dtypes == (torch.float64,) else EPS[grad.dtype] + 3e-6}
        tiny = torch.finfo(grad.dtype).smallest_normal
        torch.testing.assert_close(grad.double(), expected, atol=tiny * 1e-2, **tolerance)

    for foreach in (None, True, False):
        theirs = problem(dtypes)
        norm_of_torch = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type, foreach=foreach)
        if dtypes == (torch.float16,) and exact > 65504.0:
            assert float(norm_of_torch) == INF
            continue
        # Torch rounds norms of 16-bit gradients to their type.
        rounding = 4 * max(EPS[dtype] for dtype in dtypes) + 3e-6
        assert float(norm) == pytest.approx(float(norm_of_torch), rel=rounding)
        torch.testing.assert_close(grads_of(params), grads_of(theirs), rtol=rounding, atol=1e-7)


@pytest.mark.parametrize("clip_value", [0.0, 0.3, 60000.0, INF])
@pytest.mark.parametrize("dtypes", MIXES, ids=lambda d: "-".join(str(x)[6:] for x in d))
def test_values_are_clipped_as_torch_does(clip_value: float, dtypes: Any) -> None:
    params, theirs = problem(dtypes, 2.0), problem(dtypes, 2.0)
    for some in (params, theirs):
        some[0].grad.view(-1)[:3] = torch.tensor([math.nan, INF, -INF])  # type: ignore[union-attr]
    assert clip_grad_value_(params, clip_value) is None  # type: ignore[func-returns-value]
    torch.nn.utils.clip_grad_value_(theirs, clip_value)
    assert_bitwise_equal(grads_of(params), grads_of(theirs))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize("values", [[1.0, INF], [math.nan, 2.0], [math.nan, -INF]])
@pytest.mark.parametrize("max_norm", [1.0, INF])
def test_norms_that_are_not_finite_go_through_as_in_torch(
    norm_type: float, values: list[float], max_norm: float
) -> None:
    params = [with_grad(values), with_grad([1.0, 2.0])]
    theirs = [with_grad(values), with_grad([1.0, 2.0])]
    norm = clip_grad_norm_(params, max_norm, norm_type)
    torch.testing.assert_close(
        norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type), equal_nan=True
    )
    torch.testing.assert_close(grads_of(params), grads_of(theirs), equal_nan=True)


def test_error_if_nonfinite_has_torchs_text_and_writes_nothing() -> None:
    texts = []
    for function in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        params = [with_grad([1.0, INF]), with_grad([2.0])]
        with pytest.raises(RuntimeError) as caught:
            function(params, 1.0, 1.0, error_if_nonfinite=True)
        texts.append(str(caught.value))
        assert [grad.tolist() for grad in grads_of(params)] == [[1.0, INF], [2.0]]
    assert texts[0] == texts[1]
    assert "order 1.0" in texts[0]
    norm = clip_grad_norm_([with_grad([3.0, 4.0])], 1.0, error_if_nonfinite=True)
    assert norm.item() == 5.0


# What is taken.


def test_one_tensor_iterables_and_generators() -> None:
    model = torch.nn.Linear(3, 2)
    sources: list[Callable[[], Any]] = [
        lambda: model.weight,
        model.parameters,
        lambda: iter([model.weight]),
        lambda: {"a": model.weight}.values(),
    ]
    for source in sources:
        model.weight.grad = torch.full((2, 3), 2.0)
        assert clip_grad_norm_(source(), 1.0).item() == pytest.approx(math.sqrt(24))
        assert torch.linalg.vector_norm(model.weight.grad).item() == pytest.approx(1.0)
        clip_grad_value_(source(), 0.1)
        assert model.weight.grad.max().item() == pytest.approx(0.1)


def test_without_gradients_the_norm_is_zero() -> None:
    for params in ([], [Parameter(torch.ones(2))]):
        assert_same_bits(clip_grad_norm_(params, 1.0), torch.tensor(0.0))
        assert clip_grad_value_(params, 1.0) is None  # type: ignore[func-returns-value]
    with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
        clip_grad_norm_((param for param in ()), 1.0)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 0, -1.0, -INF])
def test_tensors_without_elements_add_nothing(norm_type: float) -> None:
    params = [with_grad(torch.zeros(0)), with_grad([3.0, 4.0]), with_grad(torch.zeros(2, 0).half())]
    assert clip_grad_norm_(params, INF, norm_type).item() == pytest.approx(
        exact_norm([torch.tensor([3.0, 4.0])], norm_type)
    )


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_gradients_of_any_strides(norm_type: float) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for view in (base.t(), base[::2, 1::2], base.reshape(1, 4, 2, 3).permute(0, 3, 1, 2)):
        grad = torch.empty_strided(view.shape, view.stride()).copy_(view)
        param, around = with_grad(grad), grad.untyped_storage().nbytes()
        norm = clip_grad_norm_(param, 1.0, norm_type)
        assert float(norm) == pytest.approx(exact_norm([view], norm_type), rel=1e-6)
        torch.testing.assert_close(param.grad, view / (norm + 1e-6))
        assert param.grad is grad
        assert grad.untyped_storage().nbytes() == around


def test_complex_gradients_are_left_to_torch() -> None:
    param = with_grad([3 + 4j, 0j], torch.complex64)
    assert clip_grad_norm_(param, 1.0).item() == pytest.approx(5.0)
    torch.testing.assert_close(param.grad, torch.tensor([0.6 + 0.8j, 0j]))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_that_autograd_watches() -> None:
    """After backward(create_graph=True); as torch's function, this one records nothing."""
    param = Parameter(torch.tensor([3.0, 4.0]))
    (param.square().sum() / 2).backward(create_graph=True)
    norm = clip_grad_norm_(param, 1.0)
    assert norm.item() == 5.0
    assert not norm.requires_grad
    torch.testing.assert_close(param.grad.detach(), torch.tensor([0.6, 0.8]))


def test_the_halves_are_those_of_the_whole() -> None:
    params, whole = problem(DTYPES), problem(DTYPES)
    norm = get_total_norm(grads_of(params))
    assert_same_bits(norm, clip_grad_norm_(whole, 0.5))
    clip_grads_with_norm_(params, 0.5, norm)
    assert_bitwise_equal(grads_of(params), grads_of(whole))
    with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0"):
        get_total_norm(torch.tensor([math.nan]), error_if_nonfinite=True)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_under_torch_compile_it_is_the_same() -> None:
    def step(param: Parameter) -> Tensor:
        return clip_grad_norm_([param], 1.0) * 2

    param = with_grad([3.0, 4.0])
    assert torch.compile(step, backend="eager")(param).item() == 10.0
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


# What is refused.


def sparse() -> Parameter:
    param = Parameter(torch.ones(3, 2))
    param.grad = torch.ones(3, 2).to_sparse()
    return param


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sparse": (
        lambda: clip_grad_norm_([Parameter(torch.ones(1)), with_grad([1.0]), sparse()], 1.0),
        *(NotImplementedError, r"clip_grad_norm_: expected the gradient of parameters\[2\] to be "),
    ),
    "sparse value": (
        lambda: clip_grad_value_([with_grad([1.0]), sparse()], 1.0),
        *(NotImplementedError, r"clip_grad_value_: expected the gradient of parameters\[1\] to"),
    ),
    "number": (
        lambda: clip_grad_norm_([with_grad([1.0]), 3], 1.0),  # type: ignore[list-item]
        *(TypeError, r"clip_grad_norm_: expected parameters\[1\] to be a tensor, got int. Pass "),
    ),
    "names": (
        lambda: clip_grad_value_({"weight": with_grad([1.0])}, 1.0),  # type: ignore[dict-item]
        *(TypeError, r"clip_grad_value_: expected parameters\[0\] to be a tensor, got str. Pass "),
    ),
    "negative max_norm": (
        lambda: clip_grad_norm_(with_grad([1.0]), -1.0),
        *(ValueError, "clip_grad_norm_: expected max_norm to be at least 0, got -1. Use "),
    ),
    "nan max_norm": (
        lambda: clip_grad_norm_(with_grad([1.0]), math.nan),
        *(ValueError, "expected max_norm to be at least 0, got nan"),
    ),
    "nan norm_type": (
        lambda: clip_grad_norm_(with_grad([1.0]), 1.0, math.nan),
        *(ValueError, "clip_grad_norm_: expected norm_type to be a number, got nan. Use 2 or "),
    ),
    "negative clip_value": (
        lambda: clip_grad_value_(with_grad([1.0]), -0.5),
        *(
            ValueError,
            r"clip_grad_value_: expected clip_value to be at least 0, got -0\.5\. Gradients ",
        ),
    ),
    "norms": (
        lambda: clip_grads_with_norm_(with_grad([1.0]), 1.0, torch.ones(2)),
        *(ValueError, r"expected total_norm to be a tensor of 1 element, got sizes \[2\]\. Pass "),
    ),
    "a number as norm": (
        lambda: clip_grads_with_norm_(with_grad([1.0]), 1.0, 3.0),  # type: ignore[arg-type]
        *(TypeError, r"clip_grads_with_norm_: expected total_norm to be a tensor .*, got 3\.0\."),
    ),
    "a module": (
        lambda: clip_grad_norm_(torch.nn.Linear(1, 1), 1.0),  # type: ignore[arg-type]
        *(TypeError, r"clip_grad_norm_: expected parameters to be .*, got Linear\. For a model, "),
    ),
    "modules to measure": (
        lambda: get_total_norm(torch.nn.Sequential(torch.nn.ReLU())),  # type: ignore[arg-type]
        *(TypeError, r"get_total_norm: expected tensors\[0\] to be a tensor, got ReLU\."),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
