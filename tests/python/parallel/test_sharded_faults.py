# SPDX-License-Identifier: BSD-3-Clause
"""A rank that ends or stops in any phase of a step: the others name phase and rank, in time.

Nobody hangs, and no process is left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import join_group, rank_context

from torchfuse.optimizers import FusedAdam
from torchfuse.parallel import ShardedOptimizer

pytestmark = pytest.mark.processes

RANKS, LOST = 3, 2
#: The group's timeout, and how long a test may last altogether.
TIMEOUT, LIMIT = 6.0, 240.0

Strike = Callable[[], None]


class Training:
    """A model with gradients of its own on each rank, and its optimizer."""

    def __init__(self, shard_gradients: bool, in_forward: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        self.optimizer = ShardedOptimizer(
            self.model.parameters(),
            FusedAdam,
            max_grad_norm=1.0,
            shard_gradients=shard_gradients,
            gather_in_forward=[*self.model] if in_forward else None,
            **({"bucket_cap_mb": 1e-4} if shard_gradients else {}),
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().sum().backward()
        self.optimizer.step()

    def save(self) -> None:
        self.optimizer.state_dict()


def before(name: str, target: Any, strike: Strike) -> None:
    """Lets the rank strike before it calls a function."""
    call = getattr(target, name)

    def struck(*arguments: Any, **options: Any) -> Any:
        strike()
        return call(*arguments, **options)

    setattr(target, name, struck)


def in_backward(training: Training, strike: Strike) -> None:
    # The gradient that backward reaches first.
    training.model[1].bias.register_hook(lambda _: strike())


def in_comparison(training: Training, strike: Strike) -> None:
    before("step", training.optimizer, strike)


def in_norm(training: Training, strike: Strike) -> None:
    before("_fused_update", training.optimizer.optim, strike)


def in_gather(training: Training, strike: Strike) -> None:
    before("run", training.optimizer._gathers, strike)


def in_save(training: Training, strike: Strike) -> None:
    before("state_dict", training.optimizer, strike)


#: How a rank is lost, whether gradients are split, and what the others were doing.
PHASES: dict[str, tuple[Callable[[Training, Strike], None], bool, str]] = {
    "reduction": (in_backward, True, "expected all 3 ranks of group '0' in the reduction of grad"),
    "comparison": (in_comparison, True, "expected all 3 ranks in the comparison of the parameters"),
    "norm": (in_norm, False, "The norm of gradients: the exchange between the 3 ranks"),
    "gather": (in_gather, True, "expected all 3 ranks in the gather of what each has updated"),
    "forward": (in_gather, True, "expected all 3 ranks in the gather of what each has updated"),
    "save": (in_save, False, "ShardedOptimizer.state_dict: expected all 3 ranks in the gather of"),
}


def struck(kind: signal.Signals) -> None:
    os.kill(os.getpid(), kind)


def train(phase: str, kind: signal.Signals, rank: int, folder: str) -> None:
    join_group(rank, RANKS, folder, TIMEOUT)
    lose, scatters, _ = PHASES[phase]
    training = Training(scatters, in_forward=phase == "forward")
    training.step()
    training.save()
    if rank == LOST:
        lose(training, partial(struck, kind))
    try:
        training.step()
        if phase == "forward":
            training.model(torch.ones(2, 8))
        training.save()
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    Path(folder, str(rank)).write_text(message)
    # Leaving would wait for the rank that is lost.
    os._exit(0)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", PHASES)
def test_the_others_name_the_phase_and_the_rank(
    phase: str, kind: signal.Signals, tmp_path: Path
) -> None:
    context = rank_context()
    arguments = [(phase, kind, rank, str(tmp_path)) for rank in range(RANKS)]
    processes = [context.Process(target=train, args=args) for args in arguments]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT
        for process in processes[:LOST]:
            process.join(max(0.1, deadline - time.monotonic()))
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank in range(LOST):
        message = (tmp_path / str(rank)).read_text()
        assert PHASES[phase][2] in message
        assert f"There is no sign of rank {LOST} of the group: ended, stopped" in message
