# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer under torch.compile: its op in one graph, its step as one clean break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads, snapshot, train
from support.compare import assert_all_same_bits, assert_same_bits
from test_optim_spec_ops import op_arguments
from test_optim_specs import BF16_MASTER, FP32, Case, Mode, every_optimizer
from torch import Tensor

from torchfuse.optimizers import FusedOptimizer
from torchfuse.testing import assert_bitwise_equal

BACKEND = "aot_eager"

each_mode = pytest.mark.parametrize("mode", [FP32, BF16_MASTER], ids=str)


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    torch._dynamo.utils.counters.clear()


@each_mode
@every_optimizer
def test_the_op_in_one_graph(case: Case, mode: Mode, device: str) -> None:
    """Between operators that read what one step wrote, and write what the next one reads."""
    params = make_params(dtype=mode.dtype, device=device)
    optimizer = case.ours(params, **mode.options)
    train(optimizer, params, [1])
    op = getattr(torch.ops.torchfuse, case.spec.op)

    def two_steps(lists: list[list[Tensor]], keywords: dict[str, Any], rate: Tensor) -> Tensor:
        op(*lists, **keywords)
        lists[1][0].mul_(2)
        op(*lists, **keywords, lr_tensor=rate, grad_scale=rate * 4)
        return lists[0][0] + 1

    rate = torch.tensor(0.5, device=device)
    in_one_graph = torch.compile(two_steps, fullgraph=True, backend=BACKEND)
    for index in range(len(optimizer.param_groups)):
        eager, keywords = op_arguments(optimizer, index)
        compiled, _ = op_arguments(optimizer, index)
        expected = two_steps(eager, keywords, rate)
        assert_same_bits(in_one_graph(compiled, keywords, rate), expected)
        for mine, theirs in zip(compiled, eager, strict=True):
            assert_bitwise_equal(mine, theirs)


@every_optimizer
def test_the_step_is_one_graph_break(case: Case) -> None:
    params, others = make_params(), make_params()
    optimizer, reference = case.ours(params), case.ours(others)

    def update(x: Tensor) -> Tensor:
        y = x * 2
        optimizer.step()
        return y + params[0].detach().sum()

    for tensors in (params, others):
        set_grads(tensors, random_grads(tensors, 0))
    explanation = torch._dynamo.explain(update)(torch.ones(3))
    assert explanation.graph_break_count == 1, explanation.break_reasons
    assert explanation.graph_count == 2
    reference.step()
    assert_all_same_bits(snapshot(optimizer), snapshot(reference))


def build(case: Case, mode: Mode) -> tuple[torch.nn.Module, FusedOptimizer]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    model.to(mode.dtype)
    return model, case.ours(model.parameters(), max_grad_norm=1.0, **mode.options)


def run(case: Case, mode: Mode, what: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Trains with nothing, the model or the whole iteration compiled."""
    model, optimizer = build(case, mode)
    forward = torch.compile(model, backend=BACKEND) if what == "model" else model

    def iteration(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if what == "iteration":
        iteration = torch.compile(iteration, backend=BACKEND)
    inputs = [
        torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(mode.dtype)
        for seed in range(4)
    ]
    losses = [iteration(x) for x in inputs]
    return snapshot(optimizer), losses


@pytest.mark.parametrize("what", ["model", "iteration", "compiled autograd"])
@each_mode
@every_optimizer
def test_compiled_training_equals_eager(
    case: Case, mode: Mode, what: str, recwarn: pytest.WarningsRecorder
) -> None:
    autograd = what == "compiled autograd"
    with torch._dynamo.config.patch(compiled_autograd=autograd):
        compiled, compiled_losses = run(case, mode, "iteration" if autograd else what)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] > 0
    assert not autograd or counters["compiled_autograd"]["captures"] > 0
    eager, eager_losses = run(case, mode, "nothing")
    assert_all_same_bits(compiled, eager)
    assert_bitwise_equal(compiled_losses, eager_losses)
    ours = [w for w in recwarn if "torchfuse" in str(w.message)]
    assert not ours, [str(w.message) for w in ours]
