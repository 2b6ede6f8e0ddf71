# SPDX-License-Identifier: BSD-3-Clause
"""The same bits on every run, stream, thread count, load and grid, and in every company.

On the CPU the same tests run on one to three threads, with other threads competing for the cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cuda_problem import (
    BF16,
    F16,
    F32,
    F64,
    FEW_KINDS,
    KINDS,
    LAYOUTS,
    PLAIN_KIND,
    SEVERAL_LAUNCHES,
    SIZES,
    Kind,
    Problem,
    Run,
    place,
    random_values,
    train,
)
from cuda_running import load, places
from support.compare import assert_all_same_bits, assert_same_bits
from support.pretended import ON_PRETENDED_CUDA
from torch import Tensor

import torchfuse
from torchfuse.optimizers import FusedAdam

# The pretended device does the same each time, unless its order of time is another.
pytestmark = pytest.mark.combinations

REPEATS = 2 if ON_PRETENDED_CUDA else 10
DTYPES = [F32, F16, BF16, F64]
#: Clipped and scaled: the whole step, with its reduction, in the bits of every parameter.
WHOLE_STEP = Run(steps=5, scaled=True, overflows=frozenset({2}))


def whole_step(kind: Kind, device: str, sizes: Sequence[int] = SIZES) -> dict[str, Tensor]:
    problem = Problem(kind, sizes, device, layout="packed", max_grad_norm=0.5)
    result = train(problem, WHOLE_STEP)
    assert set(result["state step"].tolist()) == {4.0}
    return result


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_repeats(kind: Kind, device: str) -> None:
    expected = whole_step(kind, device)
    for _ in range(REPEATS - 1):
        assert_all_same_bits(whole_step(kind, device), expected)


@pytest.mark.parametrize("sizes", [SIZES, SEVERAL_LAUNCHES], ids=["few", "many"])
@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_streams_and_threads(kind: Kind, sizes: Sequence[int], device: str) -> None:
    expected = whole_step(kind, device, sizes)
    for place_of_work in places(device).values():
        with place_of_work:
            result = whole_step(kind, device, sizes)
        assert_all_same_bits(result, expected)


@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_load(kind: Kind, device: str) -> None:
    expected = whole_step(kind, device)
    with load(device):
        for _ in range(REPEATS):
            assert_all_same_bits(whole_step(kind, device), expected)


def tensors(kind: Kind, sizes: Sequence[int], device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and gradients, each with values of its own."""
    values = [random_values(size, index).to(device) for index, size in enumerate(sizes)]
    params: list[Tensor] = [torch.nn.Parameter(v.to(kind.param)) for v in values]
    return params, [v.flip(0).to(kind.grad) for v in values]


def fill(kind: Kind, sizes: Sequence[int], device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Company: all alike, so that large ones cost little to make."""
    params: list[Tensor] = [
        torch.nn.Parameter(torch.full((size,), 0.5, dtype=kind.param, device=device))
        for size in sizes
    ]
    return params, [torch.full_like(p, 0.25, dtype=kind.grad, requires_grad=False) for p in params]


def updated(
    kind: Kind, device: str, before: Sequence[int] = (), after: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Steps the tensors under test between others; what is left of the former."""
    own, grads = tensors(kind, SIZES, device)
    company = [fill(kind, before, device), (own, grads), fill(kind, after, device)]
    params = [p for part, _ in company for p in part]
    for param, grad in zip(params, [g for _, part in company for g in part], strict=True):
        param.grad = grad
    optimizer = FusedAdam(params, weight_decay=0.1, amsgrad=True, **kind.options)
    for _ in range(3):
        optimizer.step()
    states = [optimizer.state[p] for p in own]
    named = {f"{name} {i}": t for i, state in enumerate(states) for name, t in state.items()}
    named |= {f"param {i}": p.detach() for i, p in enumerate(own)}
    return {name: t.to("cpu", copy=True) for name, t in named.items()}


COMPANY = {
    "one small": ([5], []),
    "small ones around": ([7] * 9, [3] * 20),
    "several launches before": ([1 + i % 50 for i in range(1300)], []),
    "several launches after": ([], [600] * 1300),
    # Enough fp32 elements for larger chunks, and so another grid.
    "nine million elements": ([9_000_001], [40_000]),
}


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("kind", FEW_KINDS, ids=str)
def test_other_tensors_in_the_launch(kind: Kind, company: str, device: str) -> None:
    """Without clipping each parameter is on its own, wherever its launch puts it."""
    before, after = COMPANY[company]
    assert_all_same_bits(updated(kind, device, before, after), updated(kind, device))


@pytest.mark.cuda
@pytest.mark.parametrize("elements", [17_000_000, 34_000_000, 68_000_000])
def test_every_chunk_size(elements: int) -> None:
    """Chunks grow with the list; only lists this long get the full 16,384 elements. 0.7 GB."""
    kind = Kind(BF16, BF16, BF16)
    assert_all_same_bits(updated(kind, "cuda", [elements]), updated(kind, "cuda"))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_order_of_the_list(kind: Kind, device: str) -> None:
    results = []
    for order in (range(len(SIZES)), reversed(range(len(SIZES))), [4, 0, 8, 2, 6, 1, 9, 3, 7, 5]):
        own, grads = tensors(kind, SIZES, device)
        for param, grad in zip(own, grads, strict=True):
            param.grad_dtype = None
            param.grad = grad
        optimizer = FusedAdam([own[i] for i in order], **kind.options)
        for _ in range(2):
            optimizer.step()
        results.append({str(i): p.detach().to("cpu", copy=True) for i, p in enumerate(own)})
    assert_all_same_bits(results[1], results[0])
    assert_all_same_bits(results[2], results[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layouts_give_one_result(kind: Kind, device: str) -> None:
    """Addresses decide how memory is accessed, and nothing else: not even the norm's last bit."""
    results = []
    for layout in LAYOUTS:
        problem = Problem(kind, SIZES, device, layout=layout, max_grad_norm=0.5)
        for seed in range(3):
            for index, size in enumerate(SIZES):
                values = random_values(size, 100 * seed + index)
                problem.grads[index].copy_(values)
                if seed == 0:
                    problem.params[index].data.copy_(values.flip(0))
                    state = problem.optimizer.state[problem.params[index]]
                    if "master_param" in state:
                        state["master_param"].copy_(problem.params[index].detach())
            problem.optimizer.step()
        result = problem.result()
        # Buffers have gaps of each layout's own.
        result["param"] = torch.cat([p.detach().cpu() for p in problem.params])
        names = ("param", "state exp_avg", "state exp_avg_sq", "grad_norm")
        results.append({name: result[name] for name in names})
    assert_all_same_bits(results[1], results[0])
    assert_all_same_bits(results[2], results[0])


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    return torchfuse.ops.multi_tensor_l2_norm(tensors)[0]


@pytest.mark.parametrize("sizes", [SIZES, SEVERAL_LAUNCHES], ids=["few", "many"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(dtype: torch.dtype, sizes: Sequence[int], device: str) -> None:
    """On every run, in every layout, everywhere; and zeros add nothing."""
    values = [random_values(size, i).to(dtype).to(device) for i, size in enumerate(sizes)]
    expected = norm_of(values)
    for repeat in range(REPEATS):
        assert_same_bits(norm_of(values), expected, f"repeat {repeat}")
    for name, place_of_work in places(device).items():
        with place_of_work:
            norm = norm_of(values)
        assert_same_bits(norm, expected, name)
    for layout in LAYOUTS:
        slices = place(sizes, layout)
        memory = torch.empty(slices[-1].stop, dtype=dtype, device=device)
        views = [memory[part] for part in slices]
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        assert_same_bits(norm_of(views), expected, layout)
    zeros = [torch.zeros(700, dtype=dtype, device=device)] * 1300
    assert_same_bits(norm_of([*values, *zeros]), expected, "a longer list")


@pytest.mark.parametrize("company", [F32, BF16], ids=["same dtype", "other dtype"])
def test_norm_of_a_step_wherever_the_decision_is_taken(company: torch.dtype, device: str) -> None:
    """By the last block of one launch, or by a kernel of its own where there are several dtypes."""
    norms = []
    for extra in ([], [torch.nn.Parameter(torch.ones(9, dtype=company, device=device))]):
        own, grads = tensors(PLAIN_KIND, SIZES, device)
        for param, grad in zip(
            [*own, *extra], [*grads, *map(torch.zeros_like, extra)], strict=True
        ):
            param.grad = grad.detach()
        optimizer = FusedAdam([*own, *extra], max_grad_norm=0.5)
        optimizer.step()
        norms.append(optimizer.grad_norm())
    assert isinstance(norms[0], Tensor)
    assert isinstance(norms[1], Tensor)
    assert_same_bits(norms[1], norms[0], "grad_norm")
