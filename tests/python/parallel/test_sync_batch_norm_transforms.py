# SPDX-License-Identifier: BSD-3-Clause
"""torch.func and forward-mode differentiation: in evaluation as nn.BatchNorm2d, in training not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchfuse.parallel import SyncBatchNorm

CHANNELS = 3
Layer = Callable[[Tensor], Tensor]


def _random(*shape: int) -> Tensor:
    random = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=random)


X = _random(4, CHANNELS, 2, 2)
Z = _random(4, CHANNELS, 2, 2).roll(1)


def _forward_ad(layer: Layer) -> Tensor:
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(X, X.cos()))
        return forward_ad.unpack_dual(y).tangent


def _over_weights(layer: Any) -> Tensor:
    """An ensemble: the same input for several weights."""

    def call(weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (X,))

    return torch.func.vmap(call)(_random(5, CHANNELS))


TRANSFORMS: dict[str, Callable[[Layer], Any]] = {
    "jvp": lambda layer: torch.func.jvp(layer, (X,), (X.cos(),)),
    "vjp": lambda layer: torch.func.vjp(layer, X)[1](X.cos()),
    "hessian": lambda layer: torch.func.hessian(lambda x: layer(x).pow(3).sum())(X),
    "vmap": lambda layer: torch.func.vmap(layer)(torch.stack([X, X.cos(), 3 * X])),
    "vmap over weights": _over_weights,
    "forward AD": _forward_ad,
    "jacobian": lambda layer: torch.autograd.functional.jacobian(
        layer, X, vectorize=True, strategy="forward-mode"
    ),
}


def _pair(**options: Any) -> tuple[SyncBatchNorm, nn.BatchNorm2d]:
    ours = SyncBatchNorm(CHANNELS, dtype=torch.float64, **options)
    track = options.get("track_running_stats", True)
    theirs = nn.BatchNorm2d(CHANNELS, track_running_stats=track).double()
    with torch.no_grad():
        theirs.weight.copy_(_random(CHANNELS))
        theirs.bias.copy_(_random(CHANNELS).cos())
    theirs(X)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize(
    ("name", "track_running_stats"), [*((name, True) for name in TRANSFORMS), ("vmap", False)]
)
def test_evaluation_is_transformed_as_batch_norm(name: str, track_running_stats: bool) -> None:
    ours, theirs = _pair(track_running_stats=track_running_stats)
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["jvp", "vmap"])
def test_relu_residual_and_layout_are_transformed_too(name: str) -> None:
    ours, theirs = _pair(fuse_relu=True, channel_last=True)

    def fused(x: Tensor) -> Tensor:
        result: Tensor = ours(x.movedim(1, -1), Z.movedim(1, -1))
        return result.movedim(-1, 1)

    def separate(x: Tensor) -> Tensor:
        result: Tensor = theirs(x)
        return (result + Z).relu()

    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(fused), transform(separate), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_training_is_refused(name: str) -> None:
    layer = SyncBatchNorm(CHANNELS, dtype=torch.float64)
    message = (
        r"^SyncBatchNorm\(3\): expected training to be False under torch.func's transforms, "
        r"forward-mode differentiation and while a program is exported, got "
        r"True\. Call eval\(\), or compute derivatives with torch.autograd.grad\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        TRANSFORMS[name](layer)
    assert layer.num_batches_tracked == 0


def test_training_beside_a_dual_tensor_is_training() -> None:
    """The layer's own tensors have no tangents."""
    ours, theirs = _pair()
    with forward_ad.dual_level():
        forward_ad.make_dual(X, X)
        torch.testing.assert_close(ours.train()(X), theirs.train()(X))
    torch.testing.assert_close([*ours.buffers()], [*theirs.buffers()])


@pytest.mark.parametrize("training", [False, True])
def test_batched_gradients_need_no_transform(training: bool) -> None:
    ours, theirs = (
        torch.autograd.functional.jacobian(layer.train(training), X, vectorize=True)
        for layer in _pair()
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


class _OfImages(SyncBatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 4:
            raise ValueError(f"expected 4D input (got {input.dim()}D input)")
        super()._check_input_dim(input)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_subclass_that_checks_its_input_can_be_traced(momentum: float | None) -> None:
    model = nn.Sequential(_OfImages(CHANNELS, momentum=momentum)).double().eval()
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(X), model(X), rtol=0.0, atol=1e-12)
    with pytest.raises(ValueError, match="expected 4D input"):
        model(X[0])
