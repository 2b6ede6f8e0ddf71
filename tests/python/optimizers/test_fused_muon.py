# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedMuon: orthogonal updates of matrices, and two kinds of groups."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.adam import (
    clone_params,
    make_params,
    params_of,
    random_grads,
    set_grads,
    snapshot,
    through_file,
    train,
)
from support.compare import assert_all_same_bits, assert_same_bits, norm_error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedMuon
from torchfuse.testing import (
    OPTIM_SPECS,
    assert_bitwise_equal,
    assert_close_to_torch,
)

F32 = torch.float32
#: Wide, square, tall and no matrices.
SHAPES = ((5, 33), (7,), (16, 16), (33, 5), (), (12,))
MATRICES = ((5, 33), (16, 16), (33, 5))
SPEC = next(spec for spec in OPTIM_SPECS if spec.optimizer is FusedMuon)


def muon(params: Any, **options: Any) -> FusedMuon:
    """With products in fp32 on every processor."""
    return FusedMuon(params, **{"lr": 0.02, "ns_dtype": F32, **options})


def matrix(values: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.clone())


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def zeropower_in_fp32(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """torch's function without the cast to bf16."""
    a, b, c = ns_coefficients
    tall = grad.size(0) > grad.size(1)
    x = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """For products this small, threads that wait for each other only cost time."""
    torch.set_num_threads(1)


@pytest.fixture
def torch_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", zeropower_in_fp32)


def error_of(params: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The relative difference of all elements together."""
    actual, expected = (
        torch.cat([t.detach().cpu().reshape(-1) for t in s]) for s in (params, exact)
    )
    return norm_error(actual, expected)


# --- The update ----------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.usefixtures("torch_in_fp32")
def test_a_hundred_steps_are_torchs_and_no_farther_from_fp64(
    nesterov: bool, adjust_lr_fn: str | None, device: str
) -> None:
    params = make_params(SHAPES, device=device)
    theirs = clone_params(params)
    hyper = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours = muon(params, **hyper)
    matrices, others = ([p for p in theirs if (p.ndim == 2) == kind] for kind in (True, False))
    reference = torch.optim.Muon(matrices, **hyper)  # type: ignore[arg-type]
    adamw = torch.optim.AdamW(others, lr=0.02, weight_decay=0.1, foreach=False, fused=False)
    oracle = SPEC.oracle(params, {**hyper, "weight_decay": 0.1})
    for seed in range(100):
        grads = random_grads(params, seed)
        for tensors in (params, theirs):
            set_grads(tensors, grads)
        for optimizer in (ours, reference, adamw):
            optimizer.step()
        oracle.step(grads)
    assert error_of(params, theirs) <= 1e-5
    assert error_of(params, oracle.params) <= 1.1 * error_of(theirs, oracle.params)


def test_the_columns_of_a_convolution_are_all_dimensions_but_the_first(device: str) -> None:
    values, grad = (normal(6, 4, 3, 3, seed=seed).to(device) for seed in (1, 2))
    convolution, flat = matrix(values), matrix(values.flatten(1))
    convolution.grad, flat.grad = grad, grad.flatten(1)
    for param in (convolution, flat):
        muon([param]).step()
    assert_same_bits(convolution.detach().flatten(1), flat.detach())


def stored_in_order(*order: int) -> Callable[[Tensor], Tensor]:
    """The same values, with the dimensions in this order in memory."""
    back = [order.index(dim) for dim in range(len(order))]
    return lambda values: values.permute(order).contiguous().permute(back)


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "transposed": ((9, 14), stored_in_order(1, 0)),
    "channels_last": ((6, 4, 3, 5), stored_in_order(0, 2, 3, 1)),
    "rows last": ((6, 4, 3, 5), stored_in_order(3, 1, 2, 0)),
    "rows between": ((6, 4, 3, 5), stored_in_order(2, 0, 3, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_in_memory_does_not_matter(layout: str, device: str) -> None:
    shape, laid_out = LAYOUTS[layout]
    values = normal(*shape).to(device)
    strided, plain = torch.nn.Parameter(laid_out(values)), matrix(values)
    strides = strided.stride()
    assert strides != plain.stride()
    for param in (strided, plain):
        train(muon([param]), [param], range(3))
    assert strided.stride() == strides
    assert norm_error(strided - values, plain - values) <= 1e-5


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (3, 0, 1, 2), (0, 3, 1, 2)], ids=str
)
def test_each_matrix_of_a_stack_is_orthogonalized_alone(
    order: tuple[int, ...], device: str
) -> None:
    values, grad = (normal(2, 3, 8, 5, seed=seed).to(device) for seed in (1, 2))
    stack = torch.nn.Parameter(stored_in_order(*order)(values))
    alone = [matrix(part) for part in values.flatten(0, 1)]
    stack.grad = grad
    set_grads(alone, list(grad.flatten(0, 1)))
    muon([stack], matrix_dims=2).step()
    muon(alone).step()
    expected = torch.stack([param.detach() for param in alone]).view_as(stack)
    assert norm_error(stack - values, expected - values) <= 1e-5


@pytest.mark.parametrize("shape", [(12, 20), (20, 20), (20, 12)], ids=str)
def test_polar_express_brings_all_singular_values_to_1(shape: tuple[int, int], device: str) -> None:
    rows, columns = shape
    param = torch.nn.Parameter(torch.zeros(shape, device=device))
    optimizer = muon([param], lr=1.0, polar_express=True, ns_steps=8)
    # Of all magnitudes down to a hundredth of the largest.
    left, _, right = torch.linalg.svd(normal(*shape), full_matrices=False)
    values = torch.logspace(-2, 0, min(shape))
    param.grad = (left * values @ right).to(device)
    optimizer.step()
    factor = max(1.0, rows / columns) ** 0.5
    found = torch.linalg.svdvals(param.detach().cpu()) / factor
    torch.testing.assert_close(found, torch.ones(min(shape)), rtol=0.0, atol=1e-3)


def test_a_gradient_of_zero_moves_nothing(device: str) -> None:
    params = make_params(SHAPES, device=device)
    before = [p.detach().clone() for p in params]
    set_grads(params, [torch.zeros_like(p) for p in params])
    muon(params, weight_decay=0.0).step()
    assert_bitwise_equal(params, before)


def test_a_nan_reaches_its_matrix_and_no_other(device: str) -> None:
    """Also none of its shape, which is in the same products."""
    params = make_params([(8, 5)] * 3, device=device)
    others = clone_params(params)
    for tensors in (params, others):
        set_grads(tensors, random_grads(tensors, 1))
    assert params[1].grad is not None
    params[1].grad[2, 3] = float("nan")
    for tensors in (params, others):
        muon(tensors).step()
    assert bool(params[1].isnan().all())
    assert_bitwise_equal(params[::2], others[::2])


def test_a_nan_skips_matrices_and_vectors_on_request(device: str) -> None:
    params = make_params(SHAPES, device=device)
    optimizer = muon(params, skip_non_finite=True)
    train(optimizer, params, [1])
    for number in (0, 1):  # a matrix, a vector
        set_grads(params, random_grads(params, 2))
        grad = params[number].grad
        assert grad is not None
        grad.view(-1)[2] = float("nan")
        before = snapshot(optimizer)
        optimizer.step()
        assert_all_same_bits(snapshot(optimizer), before)


def test_products_in_bf16_differ_a_little_and_both_train() -> None:
    inputs, targets = normal(32, 6, seed=3), normal(32, 4, seed=4)
    found = {}
    for dtype in (F32, torch.bfloat16):
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = muon(model.parameters(), ns_dtype=dtype)
        losses = []
        for step in range(30):
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            if step == 0:
                found[dtype] = [p.detach().clone() for p in model.parameters()]
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]
    assert 0.0 < error_of(found[torch.bfloat16], found[F32]) < 1e-2


# --- One step for both kinds ---------------------------------------------------------------------


def test_matrices_and_vectors_are_clipped_by_one_norm(device: str) -> None:
    params = make_params([(5, 4), (7,)], device=device)
    optimizer = muon(params, max_grad_norm=0.5)
    set_grads(params, grads := random_grads(params, 1))
    optimizer.step()
    norm = float(torch.cat([grad.reshape(-1).double() for grad in grads]).norm())
    assert norm > 0.5
    torch.testing.assert_close(float(torch.as_tensor(optimizer.grad_norm())), norm)
    # An orthogonalized update has lost its norm; the momentum shows it.
    for param, grad, name, share in zip(
        params, grads, ("momentum_buffer", "exp_avg"), (0.05, 0.1), strict=True
    ):
        expected = share * (0.5 / norm) * grad
        torch.testing.assert_close(optimizer.state[param][name], expected, rtol=1e-5, atol=1e-8)


def test_matrices_and_vectors_are_clipped_apart(device: str) -> None:
    shapes = [(5, 4), (7,)]
    params = make_params(shapes, device=device) + make_params(shapes, torch.bfloat16, device)
    optimizer = muon(params, max_grad_norm=0.5, clip_apart=True)
    set_grads(params, grads := random_grads(params, 1))
    optimizer.step()
    total = float(torch.cat([grad.reshape(-1).double() for grad in grads]).norm())
    torch.testing.assert_close(float(torch.as_tensor(optimizer.grad_norm())), total)
    for kind, name, share in ((0, "momentum_buffer", 0.05), (1, "exp_avg", 0.1)):
        own = grads[kind::2]
        norm = float(torch.cat([grad.reshape(-1).double() for grad in own]).norm())
        assert norm > 0.5
        for param, grad in zip(params[kind::2], own, strict=True):
            expected = share * (0.5 / norm) * grad.float()
            torch.testing.assert_close(optimizer.state[param][name], expected, rtol=1e-5, atol=1e-8)
    grads[1][0] = torch.inf  # of a vector, which also skips the matrices
    set_grads(params, grads)
    before = snapshot(optimizer, params)
    optimizer.skip_non_finite = True
    optimizer.step()
    assert_all_same_bits(snapshot(optimizer, params), before)


def test_a_step_with_a_scaler_is_the_step_without(device: str) -> None:
    params, others = make_params(SHAPES, device=device), make_params(SHAPES, device=device)
    optimizer, reference = muon(params), muon(others)
    scaler = GradScaler(device, init_scale=256.0)
    for seed in range(3):
        scaler.scale(torch.ones((), device=device))
        set_grads(params, random_grads(params, seed, scale=256.0))
        scaler.step(optimizer)
        scaler.update()
    train(reference, others, range(3))
    assert_bitwise_equal(params, others)


# --- Groups --------------------------------------------------------------------------------------


def kinds(optimizer: FusedMuon) -> list[tuple[list[tuple[int, ...]], bool]]:
    """The shapes of each group, and whether it is of matrices."""
    return [
        ([tuple(p.shape) for p in group["params"]], group["use_muon"])
        for group in optimizer.param_groups
    ]


DIVIDED = [([(5, 33), (16, 16), (33, 5)], True), ([(7,), (), (12,)], False)]


def test_lists_are_divided_into_matrices_and_others() -> None:
    params = make_params(SHAPES)
    assert kinds(muon(params)) == DIVIDED
    assert kinds(muon([{"params": params}])) == DIVIDED
    assert kinds(muon(iter(params))) == DIVIDED
    assert kinds(muon(params[:1])) == [([(5, 33)], True)]
    assert kinds(muon(params[1:2])) == [([(7,)], False)]


def test_a_set_of_parameters_has_no_order_and_is_refused() -> None:
    for kind in (muon, torch.optim.AdamW):
        with pytest.raises(TypeError, match="need to be organized in ordered collections"):
            kind([{"params": set(make_params(SHAPES))}])


def test_named_parameters_keep_their_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    names = [group["param_names"] for group in muon(model.named_parameters()).param_groups]
    assert names == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


def test_a_group_that_says_its_kind_stays_whole() -> None:
    params = make_params(SHAPES)
    groups = [{"params": params[:2], "use_muon": False}, {"params": params[2:4], "use_muon": True}]
    optimizer = muon(groups)
    assert kinds(optimizer) == [(list(SHAPES[:2]), False), (list(SHAPES[2:4]), True)]
    train(optimizer, params[:4], [1])
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert kinds(muon(params, use_muon=False)) == [(list(SHAPES), False)]


def test_options_for_adamw_are_those_of_its_groups_unless_these_have_their_own() -> None:
    params = make_params(SHAPES)
    adamw = {"lr": 3e-4, "betas": (0.8, 0.9), "weight_decay": 0.0}
    optimizer = muon(params[:2], adamw=adamw)
    optimizer.add_param_group({"params": params[2:], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4, 0.5, 0.5]
    for matrices, others in (optimizer.param_groups[:2], optimizer.param_groups[2:]):
        assert (matrices["betas"], matrices["eps"]) == ((0.9, 0.999), 1e-7)
        assert (others["betas"], others["eps"]) == ((0.8, 0.9), 1e-8)
        assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_a_vector_is_updated_as_by_adamw(device: str) -> None:
    params = make_params([(7,), (12,)], device=device)
    theirs = clone_params(params)
    hyper: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    ours = muon(params, adamw=hyper)
    reference = torch.optim.AdamW(theirs, **hyper, foreach=False, fused=False)
    for optimizer, tensors in ((ours, params), (reference, theirs)):
        train(optimizer, tensors, range(20))
    assert_close_to_torch(params, theirs)


def test_a_group_added_later_is_divided_or_changes_nothing() -> None:
    params, twins = make_params(SHAPES), make_params(SHAPES)
    optimizer, reference = muon(params), muon(twins)
    train(optimizer, params, [1])
    gap = torch.nn.Parameter(torch.ones(4, 4)[:, 0])
    # Its matrices are fine: they are added before the vector is looked at.
    with pytest.raises(ValueError, match=r"FusedMuon: expected params\[0\] of group 3 to be"):
        optimizer.add_param_group({"params": [*make_params(MATRICES, seed=5), gap]})
    assert kinds(optimizer) == DIVIDED
    train(optimizer, params, [2])
    train(reference, twins, [1, 2])
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))
    optimizer.add_param_group({"params": make_params(SHAPES, seed=5)})
    assert kinds(optimizer) == 2 * DIVIDED


class Model(torch.nn.Module):
    """With parameters of every kind, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(9, 4)
        self.bags = torch.nn.EmbeddingBag(9, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.head = torch.nn.Linear(4, 9)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)


def names_of_groups(groups: list[dict[str, Any]]) -> dict[bool, list[str]]:
    return {group["use_muon"]: [name for name, _ in group["params"]] for group in groups}


def test_split_leaves_vectors_embeddings_and_named_parameters_to_adamw() -> None:
    model = Model()
    others = ["words.weight", "bags.weight", "norm.weight", "norm.bias"]
    others += ["layers.0.bias", "layers.1.bias", "head.bias"]
    layers = ["layers.0.weight", "layers.1.weight"]
    found = names_of_groups(FusedMuon.split(model))
    assert (found[True], sorted(found[False])) == ([*layers, "head.weight"], sorted(others))
    for patterns in (["head.weight"], "head.*", ["he?d.weight", "norm.*"]):
        found = names_of_groups(FusedMuon.split(model, adamw=patterns))
        assert found[True] == layers
        assert sorted(found[False]) == sorted([*others, "head.weight"])
    assert list(names_of_groups(FusedMuon.split(model, adamw="*"))) == [False]
    optimizer = muon(FusedMuon.split(model, adamw=["head.*"]), adamw={"lr": 3e-4})
    assert optimizer.param_groups[0]["param_names"] == layers
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]


def test_split_finds_a_tied_weight_by_each_of_its_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for name in ("0.weight", "1.weight"):
        found = names_of_groups(FusedMuon.split(model, adamw=[name]))
        assert found == {False: ["0.weight", "0.bias", "1.bias"]}


@pytest.mark.parametrize("name", ["tail.weight", "frozen.weight", "layers.?"])
def test_split_refuses_a_name_without_a_parameter(name: str) -> None:
    message = rf"^FusedMuon\.split: expected adamw to name parameters .* got '{name}', which "
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        FusedMuon.split(Model(), adamw=["head.*", name])


# --- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_in_fp32")
def test_checkpoints_of_torchs_muon_go_on_in_ours_and_ours_in_torchs(device: str) -> None:
    theirs = make_params(MATRICES, device=device)
    hyper: dict[str, Any] = {"lr": 0.01, "momentum": 0.8, "ns_steps": 4}
    reference = torch.optim.Muon(theirs, **hyper)
    train(reference, theirs, [1, 2])
    params, again = clone_params(theirs), clone_params(theirs)
    ours, back = muon(params, lr=7.0), torch.optim.Muon(again, lr=7.0)
    ours.load_state_dict(through_file(reference.state_dict()))
    assert all(ours.param_groups[0][key] == value for key, value in hyper.items())
    assert (ours.param_groups[0]["use_muon"], ours.param_groups[0]["ns_dtype"]) == (True, F32)
    back.load_state_dict(through_file(ours.state_dict()))
    for optimizer, tensors in ((reference, theirs), (ours, params), (back, again)):
        train(optimizer, tensors, [3, 4])
    for tensors in (params, again):
        assert error_of(tensors, theirs) <= 1e-5


def test_checkpoints_of_torchs_adamw_go_on_in_a_group_of_ours() -> None:
    theirs = make_params(SHAPES)
    hyper: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "foreach": False, "fused": False}
    reference = torch.optim.AdamW(theirs, **hyper)
    train(reference, theirs, [1, 2])
    ours = muon(params := clone_params(theirs), use_muon=False)
    ours.load_state_dict(through_file(reference.state_dict()))
    assert not {"amsgrad", "maximize", "decoupled_weight_decay"} & set(ours.param_groups[0])
    train(reference, theirs, [3, 4])
    train(ours, params, [3, 4])
    assert_close_to_torch(params, theirs)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (torch.optim.AdamW, "amsgrad", True),
        (torch.optim.AdamW, "maximize", True),
        (torch.optim.Adam, "decoupled_weight_decay", None),
        (FusedAdam, "adam_w_mode", False),
        (FusedAdam, "bias_correction", False),
    ],
)
def test_checkpoints_of_another_adam_are_refused(kind: Any, option: str, value: Any) -> None:
    chosen = {} if value is None else {option: value}
    theirs = kind(make_params(), weight_decay=0.1, **chosen)
    optimizer = muon(params := make_params(), use_muon=False)
    with pytest.raises(ValueError, match=f"expected {option} of a group without use_muon to be"):
        optimizer.load_state_dict(theirs.state_dict())
    train(optimizer, params, [1])


@pytest.mark.usefixtures("torch_in_fp32")
def test_checkpoints_go_both_ways_between_torchs_pair_and_ours() -> None:
    theirs = make_params(SHAPES)
    matrices, vectors = ([p for p in theirs if (p.ndim == 2) is key] for key in (True, False))
    pair = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(vectors, lr=1e-3)]
    for optimizer, tensors in zip(pair, (matrices, vectors), strict=True):
        train(optimizer, tensors, [1, 2])
    params = clone_params([*matrices, *vectors])
    ours = muon(params)
    ours.load_state_dict(FusedMuon.merged_state_dict(*(o.state_dict() for o in pair)))
    for optimizer, state in zip(
        pair, FusedMuon.separate_state_dicts(ours.state_dict()), strict=True
    ):
        optimizer.load_state_dict(through_file(state))
    set_grads(params, random_grads(params, 3))
    for param, own in zip([*matrices, *vectors], params, strict=True):
        param.grad = own.grad
    for optimizer in (*pair, ours):
        optimizer.step()
    assert error_of(params, [*matrices, *vectors]) <= 1e-5


def test_a_copy_still_divides_the_groups_that_it_gets() -> None:
    copied = copy.deepcopy(muon(make_params(), adamw={"lr": 1e-4}))
    copied.add_param_group({"params": make_params(seed=2)})
    assert [group["lr"] for group in copied.param_groups if not group["use_muon"]] == [1e-4, 1e-4]


def test_names_of_any_type_are_accepted() -> None:
    params = make_params(SHAPES)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = FusedMuon([(str(i), param) for i, param in enumerate(params)])
    for names in (list(range(len(params))), None, ["\ud800"] * len(params)):
        optimizer.param_groups[0]["param_names"] = names
        optimizer.param_groups[0]["params"] = list(optimizer.param_groups[0]["params"])
        optimizer.step()


def test_a_dispatch_mode_around_the_step_changes_nothing() -> None:
    found = []
    for mode in (FakeTensorMode(), contextlib.nullcontext()):
        optimizer = muon(params := make_params())
        train(optimizer, params, [1])
        set_grads(params, random_grads(params, 2))
        with mode:
            optimizer.step()
        found.append(snapshot(optimizer))
    assert_all_same_bits(*found)


def test_a_state_of_the_other_kind_is_refused() -> None:
    saved = muon(params := make_params(MATRICES))
    train(saved, params, [1])
    optimizer = muon(make_params(MATRICES), use_muon=False)
    state_dict = copy.deepcopy(saved.state_dict())
    state_dict["param_groups"][0]["use_muon"] = False
    with pytest.raises(ValueError, match=r"expected state\[0\] to hold 'exp_avg', got the keys"):
        optimizer.load_state_dict(state_dict)


# --- Refusals ------------------------------------------------------------------------------------

NO_MATRIX = (
    r"params\[0\] of group 0 to have at least {} dimensions with use_muon, got the shape \{}"
)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {"use_muon": True}, NO_MATRIX.format(2, "[3]")),
        ((3, 2), {"matrix_dims": 3}, NO_MATRIX.format(3, "[3, 2]")),
        (
            (3, 0),
            {"use_muon": True},
            r"params\[0\] of group 0 to have no dimension of size 0 with use_muon, got th",
        ),
        ((3, 2), {"matrix_dims": 1}, "matrix_dims of group 0 to be 0 or at least 2, got 1"),
        ((3, 2), {"matrix_dims": 2.0}, "matrix_dims of group 0 to be an int, got float"),
        ((3, 2), {"ns_steps": 0}, "ns_steps of group 0 to be at least 1 and less than 100, got 0"),
        (
            (3, 2),
            {"ns_steps": 100},
            "ns_steps of group 0 to be at least 1 and less than 100, got 1",
        ),
        ((3, 2), {"ns_steps": True}, "ns_steps of group 0 to be an int, got bool"),
        ((3, 2), {"adjust_lr_fn": "rms"}, "adjust_lr_fn of group 0 to be one of None, original, "),
        ((3, 2), {"ns_dtype": torch.float16}, "ns_dtype of group 0 to be one of None, torch.float"),
        ((3, 2), {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients of group 0 to be 3 numbers, go"),
        ((3, 2), {"ns_coefficients": 3.0}, "ns_coefficients of group 0 to be 3 numbers, got 3.0"),
        ((3, 2), {"polar_express": "yes"}, "polar_express of group 0 to be a bool, got 'yes'"),
        ((3, 2), {"adamw": {"amsgrad": True}}, "adamw to hold lr, betas, eps, weight_decay, got "),
    ],
    ids=str,
)
def test_what_is_no_matrix_or_out_of_range_is_refused(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    param = torch.nn.Parameter(torch.ones(shape))
    with pytest.raises((TypeError, ValueError), match=f"^FusedMuon: expected {message}"):
        FusedMuon([param], **options)


@pytest.mark.parametrize(
    ("key", "value"),
    [("ns_steps", 0), ("ns_steps", 2.5), ("adjust_lr_fn", "rms"), ("matrix_dims", 3)],
)
def test_an_edit_out_of_range_is_refused_by_the_step_and_changes_nothing(
    key: str, value: Any
) -> None:
    optimizer = muon(params := make_params(SHAPES))
    train(optimizer, params, [1])
    before, good = snapshot(optimizer), optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = value
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"FusedMuon\.step: expected"):
        optimizer.step()
    assert_all_same_bits(snapshot(optimizer), before)
    optimizer.param_groups[0][key] = good
    train(optimizer, params_of(optimizer), [2])
