# SPDX-License-Identifier: BSD-3-Clause
"""Models with SyncBatchNorm under DistributedDataParallel, as one process on the pooled batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.cases import run_cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchfuse.parallel import convert_syncbn_model

pytestmark = pytest.mark.processes


def _make_model(norm: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        norm(8),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def _train(model: nn.Module, x: torch.Tensor, target: torch.Tensor, share: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), target) * share).backward()
        optimizer.step()


BATCH = 12


UNEVEN = [3, 9]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, 3, 6, 6, generator=random)
    return x, torch.randint(5, (BATCH,), generator=random)


State = dict[str, torch.Tensor]


def _train_rank(mode: str, device: str, rank: int) -> State:
    x, target = (tensor.to(device) for tensor in _batch())
    first = sum(UNEVEN[:rank])
    own = slice(first, first + UNEVEN[rank])
    model = _make_model(nn.BatchNorm2d).to(device)
    convert_syncbn_model(model, own_communicator=mode == "own communicator")
    if mode == "compiled":
        model = torch.compile(model, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    # DDP averages over ranks, cross_entropy over a rank's samples.
    _train(ddp, x[own], target[own], share=2 * UNEVEN[rank] / BATCH)
    state: State = ddp.module.state_dict()
    return state


MODES = ("default group", "own communicator", "compiled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, group_device: str) -> dict[str, list[State]]:
    """The state of each rank, by mode."""
    cases = {mode: partial(_train_rank, mode, group_device) for mode in MODES}
    return run_cases(tmp_path_factory.mktemp("trained"), 2, cases, device=group_device)


@pytest.mark.parametrize("mode", MODES)
def test_trains_under_ddp_as_one_process_on_the_pooled_batch(
    mode: str, trained: dict[str, list[State]]
) -> None:
    states = trained[mode]
    model = _make_model(nn.BatchNorm2d)
    _train(model, *_batch(), share=1.0)
    for name, expected in model.state_dict().items():
        for state in states:
            actual = state.get(name, state.get(f"_orig_mod.{name}"))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
