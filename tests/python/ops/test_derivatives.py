# SPDX-License-Identifier: BSD-3-Clause
"""No operator loses a gradient without a word: what is returned has a derivative or says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

OPS = torch.ops.torchfuse
CHANNELS = 3
RULE: dict[str, Any] = {"momentum": 0.1, "eps": 1e-5}

Inputs = dict[str, Tensor]


def inputs(device: str) -> Inputs:
    torch.manual_seed(2)
    given = {name: torch.randn(4, CHANNELS, device=device) for name in ("x", "grad")}
    given |= {name: torch.rand(CHANNELS, device=device) for name in ("weight", "bias")}
    packed = OPS.batch_norm_stats(given["x"])
    saved = OPS.batch_norm_elemt(given["x"], *[None] * 2, packed, *[None] * 4, **RULE)[1]
    return {name: tensor.requires_grad_() for name, tensor in given.items()} | {
        "mean": torch.zeros(CHANNELS, device=device),
        "var": torch.ones(CHANNELS, device=device),
        "batches": torch.zeros((), dtype=torch.int64, device=device),
        "packed": packed,
        "saved": saved,
        "sums": torch.ones(2 * CHANNELS, dtype=torch.float64, device=device),
        "rows": torch.ones(4, device=device),
        "labels": torch.tensor([0, 2, 1, 2], device=device),
    }


#: Every operator that returns tensors, called on inputs that require grad.
CALLS: dict[str, Callable[[Inputs], Any]] = {
    "multi_tensor_l2_norm": lambda t: OPS.multi_tensor_l2_norm([t["grad"].detach(), t["x"]]),
    "batch_norm_stats": lambda t: OPS.batch_norm_stats(t["x"]),
    "batch_norm_elemt": lambda t: OPS.batch_norm_elemt(
        t["x"], t["weight"], t["bias"], t["packed"], t["mean"], t["var"], t["batches"], None, **RULE
    ),
    "batch_norm_backward_reduce": lambda t: OPS.batch_norm_backward_reduce(
        t["grad"], t["x"], t["saved"], t["weight"], t["bias"], None
    ),
    "batch_norm_backward_elemt": lambda t: OPS.batch_norm_backward_elemt(
        t["grad"], t["x"], t["saved"], t["sums"], t["weight"], t["bias"]
    ),
    "sync_batch_norm": lambda t: OPS.sync_batch_norm(
        t["x"], t["weight"], t["bias"], t["mean"], t["var"], t["batches"], training=True, **RULE
    ),
    "layer_norm_forward": lambda t: OPS.layer_norm_forward(
        t["x"], 1, t["weight"], t["bias"], eps=1e-5
    ),
    "layer_norm_backward": lambda t: OPS.layer_norm_backward(
        t["grad"], t["x"], 1, t["rows"], t["rows"], t["weight"], t["bias"]
    ),
    "layer_norm": lambda t: OPS.layer_norm(t["x"], 1, t["weight"], t["bias"], eps=1e-5),
    "softmax_cross_entropy_forward": lambda t: OPS.softmax_cross_entropy_forward(
        t["x"], t["labels"]
    ),
    "softmax_cross_entropy_backward": lambda t: OPS.softmax_cross_entropy_backward(
        t["grad"][:, 0], t["x"], t["rows"], t["labels"]
    ),
    "softmax_cross_entropy": lambda t: OPS.softmax_cross_entropy(t["x"], t["labels"]),
}
#: Those with a derivative; of the output, not of the moments beside it.
DIFFERENTIABLE = ("sync_batch_norm", "layer_norm", "softmax_cross_entropy")


def returned_by(name: str, given: Inputs) -> list[Tensor]:
    returned = CALLS[name](given)
    return [returned] if isinstance(returned, Tensor) else list(returned)


@pytest.mark.parametrize("name", sorted({*CALLS} - {*DIFFERENTIABLE}))
def test_a_backward_pass_raises_as_through_torchs_igamma(name: str, device: str) -> None:
    given = inputs(device)
    oracle = torch.igamma(given["x"], torch.ones_like(given["x"]))
    with pytest.raises(RuntimeError, match=r"derivative for 'igamma: \w+' is not implemented"):
        oracle.sum().backward()
    for tensor in returned_by(name, given):
        assert tensor.requires_grad == oracle.requires_grad
        with pytest.raises(
            RuntimeError, match=rf"derivative for torchfuse::{name} is not implemented"
        ):
            (tensor.sum() + given["x"].sum()).backward()
    assert all(tensor.grad is None for tensor in given.values() if tensor.requires_grad)


@pytest.mark.parametrize("name", sorted({*CALLS} - {*DIFFERENTIABLE}))
def test_without_gradients_nothing_is_recorded(name: str, device: str) -> None:
    given = inputs(device)
    with torch.no_grad():
        expected = returned_by(name, given)
    detached = {key: tensor.detach().clone() for key, tensor in inputs(device).items()}
    for found in (expected, returned_by(name, detached)):
        assert not any(tensor.requires_grad for tensor in found)
    recorded = inputs(device)
    for a, b in zip(returned_by(name, recorded), expected, strict=True):
        assert torch.equal(a, b)
    # What is updated on the way is no part of the graph.
    assert not any(recorded[key].requires_grad for key in ("mean", "var", "batches"))
    for key in ("mean", "var", "batches"):
        assert torch.equal(recorded[key], given[key])


@pytest.mark.parametrize("name", sorted({*CALLS} - {*DIFFERENTIABLE}))
def test_forward_derivatives_raise_too(name: str, device: str) -> None:
    given = {key: tensor.detach() for key, tensor in inputs(device).items()}
    with torch.autograd.forward_ad.dual_level():
        given["x"] = torch.autograd.forward_ad.make_dual(given["x"], torch.ones_like(given["x"]))
        with pytest.raises(NotImplementedError, match=f"forward AD with torchfuse::{name}"):
            returned_by(name, given)


def test_the_moments_of_sync_batch_norm_are_constants(device: str) -> None:
    given = inputs(device)
    output, packed = returned_by("sync_batch_norm", given)
    assert output.requires_grad
    assert not packed.requires_grad
    output.square().sum().backward()
    reference = {name: given[name].detach().clone().requires_grad_() for name in ("x", "weight")}
    expected = torch.nn.functional.batch_norm(
        reference["x"], None, None, reference["weight"], given["bias"].detach(), training=True
    )
    expected.square().sum().backward()
    for name, tensor in reference.items():
        torch.testing.assert_close(given[name].grad, tensor.grad, rtol=1e-4, atol=1e-5)
