# SPDX-License-Identifier: BSD-3-Clause
"""convert_syncbn_model keeps what a layer is, and revert_syncbn_model gives it back."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrize, prune

from torchfuse.parallel import (
    SyncBatchNorm,
    convert_syncbn_model,
    revert_syncbn_model,
)


class Activated(nn.BatchNorm2d):
    """A subclass whose forward does more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.3),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)),
        nn.InstanceNorm2d(4),
        nn.Flatten(),
        nn.LazyLinear(5),
        nn.BatchNorm1d(5, track_running_stats=False, momentum=None),
    )


X = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def test_the_converted_model_computes_the_same() -> None:
    plain = make_model()
    plain(X)
    converted = convert_syncbn_model(copy.deepcopy(plain))
    for training in (True, False):
        torch.testing.assert_close(
            converted.train(training)(X), plain.train(training)(X), rtol=1e-5, atol=1e-5
        )
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    kinds = [type(module) for module in converted.modules()]
    assert kinds.count(SyncBatchNorm) == 3
    assert kinds.count(nn.InstanceNorm2d) == 1


def test_parameters_buffers_and_settings_move_over() -> None:
    layer = nn.BatchNorm2d(4, eps=1e-3, momentum=0.3).double().eval()
    layer.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    new = convert_syncbn_model(layer, deterministic=True)
    assert isinstance(new, SyncBatchNorm)
    assert new.weight is layer.weight
    assert new.running_var is layer.running_var
    assert optimizer.param_groups[0]["params"][1] is new.bias
    assert (new.eps, new.momentum, new.training) == (1e-3, 0.3, False)
    assert new.deterministic
    assert not new.weight.requires_grad


def test_hooks_move_over() -> None:
    layer = nn.BatchNorm1d(2)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_forward_pre_hook(
        lambda *_, **__: seen.append("before"),
        with_kwargs=True,  # type: ignore[arg-type]
    )
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    new = convert_syncbn_model(layer)
    new(torch.randn(4, 2, requires_grad=True)).sum().backward()
    new.state_dict()
    assert seen == ["before", "forward", "backward", "state"]


def converted_and_back(layer: nn.Module) -> nn.Module:
    return revert_syncbn_model(convert_syncbn_model(layer))


@pytest.mark.parametrize("convert", [convert_syncbn_model, converted_and_back])
def test_a_full_backward_hook_sees_the_gradient_of_the_input(convert: Any) -> None:
    """One that is taken for the older kind is given other gradients."""
    seen: list[tuple[Tensor, ...]] = []
    layer = nn.BatchNorm1d(3)
    layer.register_full_backward_hook(lambda module, grad_input, _: seen.append(grad_input))
    x = torch.randn(4, 3, requires_grad=True)
    convert(layer)(x).square().sum().backward()
    ((grad,),) = seen
    assert torch.equal(grad, x.grad)  # type: ignore[arg-type]


def test_a_hook_that_is_always_called_is_called_after_an_error() -> None:
    calls: list[str] = []
    layer = nn.BatchNorm1d(3)
    layer.register_forward_hook(lambda *_: calls.append("called"), always_call=True)
    with pytest.raises(ValueError, match="channels in dimension 1, got 4"):
        convert_syncbn_model(layer)(torch.randn(2, 4))
    assert calls == ["called"]


def test_a_layer_in_two_places_stays_one() -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared), "c": shared})
    convert_syncbn_model(model)
    assert isinstance(model["a"][0], SyncBatchNorm)  # type: ignore[index]
    assert model["a"][0] is model["b"][0] is model["c"]  # type: ignore[index]


def test_layers_that_would_lose_something_stay_with_a_warning() -> None:
    model = nn.Sequential(Activated(3), nn.LazyBatchNorm2d(), nn.BatchNorm2d(3))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        convert_syncbn_model(model)
    told = [str(warning.message) for warning in seen]
    assert told == [
        "convert_syncbn_model did not convert layer '0': Activated has a custom forward, which "
        "would be lost.",
        "convert_syncbn_model did not convert layer '1': LazyBatchNorm2d has not seen a batch yet.",
    ]
    assert [type(layer) for layer in model] == [Activated, nn.LazyBatchNorm2d, SyncBatchNorm]
    model(torch.randn(2, 3, 4, 4))
    convert_syncbn_model(model[1:])
    assert type(model[1]) is nn.BatchNorm2d


def test_a_forward_that_was_set_on_the_layer_stays_with_a_warning() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    plain = model[0].forward
    model[0].forward = lambda x: plain(x).relu()
    expected = model(X)
    with pytest.warns(UserWarning, match="layer '0': BatchNorm2d has a custom forward, wh"):
        convert_syncbn_model(model)
    torch.testing.assert_close(model(X), expected)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


@pytest.mark.parametrize(("name", "kind"), [("weight", nn.BatchNorm2d), ("bias", nn.SyncBatchNorm)])
def test_parametrized_layers_stay_with_a_warning(name: str, kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(3), nn.BatchNorm2d(3))
    parametrize.register_parametrization(model[0], name, Square())
    names, layer = list(model.state_dict()), model[0]
    told = f"Parametrized{kind.__name__} contains parametrizations, which would be lost.$"
    with pytest.warns(UserWarning, match=f"did not convert layer '0': {told}"):
        convert_syncbn_model(model)
    assert model[0] is layer
    assert isinstance(model[1], SyncBatchNorm)
    assert list(model.state_dict()) == names


def test_pruned_weights_move_over() -> None:
    plain = prune.random_unstructured(nn.BatchNorm2d(3), "weight", amount=1)
    with torch.no_grad():
        plain.weight_orig.uniform_(1, 2)
    expected = plain(X)
    new = convert_syncbn_model(plain)
    assert isinstance(new, SyncBatchNorm)
    torch.testing.assert_close(new(X), expected, rtol=1e-5, atol=1e-5)


def test_the_way_back_of_a_parametrized_layer_is_refused() -> None:
    model = nn.Sequential(convert_syncbn_model(nn.BatchNorm2d(3)))
    parametrize.register_parametrization(model[0], "weight", Square())
    with pytest.raises(ValueError, match=r"layer '' to contain no modules, got parametrizatio"):
        revert_syncbn_model(model)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(revert_syncbn_model(model)[0]) is nn.BatchNorm2d  # type: ignore[index]


def test_the_way_back() -> None:
    plain = make_model()
    plain(X)
    model = convert_syncbn_model(copy.deepcopy(plain))
    weight = model[1].weight
    reverted = revert_syncbn_model(model)
    assert [type(m) for m in reverted.modules()] == [type(m) for m in plain.modules()]
    assert repr(reverted) == repr(plain)
    assert reverted[1].weight is weight  # type: ignore[index]
    torch.testing.assert_close(reverted(X), plain(X))


def test_the_way_back_of_a_layer_that_was_none() -> None:
    layer = SyncBatchNorm(3)
    reverted = revert_syncbn_model(layer)
    for shape in ((4, 3), (2, 3, 4, 5, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(reverted(x), layer(x))
    with pytest.raises(ValueError, match="expected at least 2D input"):
        reverted(torch.randn(3))
    with pytest.raises(ValueError, match=r"layer '' to be without fuse_relu and channel_last"):
        revert_syncbn_model(SyncBatchNorm(3, fuse_relu=True))


def test_torchs_layer_is_converted_with_apexs_options() -> None:
    new = convert_syncbn_model(nn.SyncBatchNorm(3), channel_last=True)
    assert isinstance(new, SyncBatchNorm)
    torch.testing.assert_close(new(X.movedim(1, -1)).movedim(-1, 1), nn.BatchNorm2d(3)(X))
    assert convert_syncbn_model(new) is new


def test_layers_that_are_synchronized_get_the_group(mesh: DeviceMesh) -> None:
    """As those that were loaded, whose file holds no groups."""
    group = mesh.get_group()
    model = convert_syncbn_model(nn.Sequential(SyncBatchNorm(2)), process_group=group)
    assert model[0].process_group is group
