# SPDX-License-Identifier: BSD-3-Clause
"""Megatron-Core under the alias: what it takes from apex, called as it calls it.

Megatron-Core makes tensors on a GPU by name; here they are made on the CPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from trained_alike import assert_trained_alike, make_network

import torchfuse.apex
from torchfuse import optimizers


class CpuForCuda(TorchFunctionMode):
    """Answers for a GPU that is not there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    torchfuse.apex.install()
    yield lambda name: importlib.import_module(f"megatron.core.{name}")
    torchfuse.apex.uninstall()
    for name in [name for name in sys.modules if name.startswith("megatron")]:
        del sys.modules[name]


@pytest.fixture
def group(megatron: Any, tmp_path: Path) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = megatron("parallel_state")
    state.initialize_model_parallel()
    yield state.get_model_parallel_group()
    state.destroy_model_parallel()
    dist.destroy_process_group()


def test_it_takes_its_functions_and_optimizers_from_the_alias(megatron: Any) -> None:
    clipping, optimizer = megatron("optimizer.clip_grads"), megatron("optimizer.optimizer")
    for function in (
        *(clipping.l2_norm_impl, clipping.multi_tensor_scale_impl),
        *(optimizer.multi_tensor_scale_impl, optimizer.multi_tensor_applier),
    ):
        assert function.__module__.startswith("torchfuse.")
    package = megatron("optimizer")
    assert not package.USING_PYTORCH_OPTIMIZER
    assert issubclass(package.Adam, optimizers.FusedAdam)
    assert issubclass(package.SGD, optimizers.FusedSGD)
    norms = megatron("fusions.fused_layer_norm")
    assert norms.HAVE_FUSED_LAYER_NORM
    assert norms.HAVE_PERSIST_LAYER_NORM


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping_is_that_of_torch(
    max_norm: float, megatron: Any, group: Any, digits: tuple[Tensor, Tensor]
) -> None:
    clipping = megatron("optimizer.clip_grads")
    ours, theirs = make_network(), make_network()
    for model in (ours, theirs):
        nn.functional.cross_entropy(model(digits[0]), digits[1]).backward()
    grads = [param.grad for param in ours.parameters()]
    with CpuForCuda():
        norm = clipping.get_grad_norm_fp32(grads, grad_stats_parallel_group=group)
        clipping.clip_grad_by_total_norm_fp32(list(ours.parameters()), max_norm, norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm).item()
    assert norm == pytest.approx(expected, rel=1e-6)
    for grad, param in zip(grads, theirs.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("hidden_size", [48, 1024], ids=["fused", "persistent"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_normalization_is_that_of_torch(
    zero_centered: bool, hidden_size: int, megatron: Any
) -> None:
    config = megatron("transformer").TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        num_attention_heads=1,
        layernorm_zero_centered_gamma=zero_centered,
        persist_layer_norm=True,
        memory_efficient_layer_norm=True,
    )
    layer = megatron("fusions.fused_layer_norm").FusedLayerNorm(config, hidden_size)
    assert layer.persist_layer_norm == (hidden_size == 1024)
    torch.manual_seed(0)
    inputs = torch.randn(6, hidden_size, requires_grad=True)
    target = torch.randn(6, hidden_size)
    (layer(inputs) * target).sum().backward()
    plain = nn.LayerNorm(hidden_size)
    again = inputs.detach().clone().requires_grad_()
    (plain(again) * target).sum().backward()
    torch.testing.assert_close(layer(inputs), plain(again))
    for actual, wanted in ((inputs, again), (layer.weight, plain.weight), (layer.bias, plain.bias)):
        torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-4, atol=1e-5)


class ByHand:
    """A bf16 model with fp32 masters in plain torch."""

    def __init__(self) -> None:
        self.model, self.masters = make_network().bfloat16(), make_network()
        self.pairs = list(zip(self.model.parameters(), self.masters.parameters(), strict=True))
        with torch.no_grad():
            for param, master in self.pairs:
                master.copy_(param)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=3e-3, weight_decay=0.01)

    def step(self, digits: tuple[Tensor, Tensor]) -> float:
        self.model.zero_grad()
        loss_of(self.model, digits).backward()
        for param, master in self.pairs:
            master.grad = param.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters.parameters(), 0.5)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in self.pairs:
                param.copy_(master)
        return norm.item()


def loss_of(model: nn.Module, digits: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(digits[0].bfloat16()).float(), digits[1])


@pytest.mark.usefixtures("group")
def test_its_optimizer_with_fp32_masters_trains_as_by_hand(
    megatron: Any, digits: tuple[Tensor, Tensor]
) -> None:
    module, package = megatron("optimizer.optimizer"), megatron("optimizer")
    config = package.OptimizerConfig(lr=3e-3, bf16=True, clip_grad=0.5)
    model, theirs = make_network().bfloat16(), ByHand()
    with CpuForCuda():
        adam = package.Adam(model.parameters(), lr=3e-3, weight_decay=0.01)
        ours = module.Float16OptimizerWithFloat16Params(adam, config, None, lambda *_: None)
    for _ in range(10):
        with CpuForCuda():
            ours.zero_grad()
            loss_of(model, digits).backward()
            for param in model.parameters():
                param.main_grad = param.grad.float()
            succeeded, norm, _ = ours.step()
        assert succeeded
        assert norm == pytest.approx(theirs.step(digits), rel=1e-2)
    masters = make_network()
    mains = [param for params in ours.fp32_from_float16_groups for param in params]
    with torch.no_grad():
        for param, main, copy in zip(model.parameters(), mains, masters.parameters(), strict=True):
            assert torch.equal(param, main.bfloat16())
            copy.copy_(main)
    assert_trained_alike(masters, theirs.masters, make_network())
