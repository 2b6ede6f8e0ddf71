# SPDX-License-Identifier: BSD-3-Clause
"""ResumableSampler: the rest of an epoch, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

import torchfuse
from torchfuse import ResumableSampler

DATA: Any = range(12)
MAKERS: dict[str, Callable[[], Sampler[Any]]] = {
    "distributed": lambda: DistributedSampler(DATA, 2, 1, seed=3),
    "random": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(4)),
    "sequential": lambda: SequentialSampler(DATA),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_epoch_goes_on(tmp_path: Path, name: str) -> None:
    sampler = ResumableSampler(MAKERS[name]())
    list(sampler)
    sampler.set_epoch(1)
    loader = DataLoader(DATA, batch_size=2, sampler=sampler, num_workers=0)
    batches = [batch.tolist() for batch in loader]
    sampler.advance(4)
    torchfuse.save_checkpoint(tmp_path / "last.pt", sampler=sampler)
    sampler.set_epoch(1)
    list(sampler)  # what is drawn ahead does not count

    resumed = ResumableSampler(MAKERS[name]())
    torchfuse.load_checkpoint(tmp_path / "last.pt", sampler=resumed)
    resumed.set_epoch(1)
    rest = DataLoader(DATA, batch_size=2, sampler=resumed)
    assert [batch.tolist() for batch in rest] == batches[2:]
    assert len(resumed) == len(sampler)
    resumed.set_epoch(2)
    assert len(list(resumed)) == len(batches) * 2


def epochs(sampler: ResumableSampler, numbers: range, drop_last: bool) -> list[list[int]]:
    """Trains epochs and returns their orders."""
    loader = DataLoader(DATA, batch_size=5, sampler=sampler, drop_last=drop_last)
    orders: list[list[int]] = []
    for number in numbers:
        sampler.set_epoch(number)
        orders.append([])
        for batch in loader:
            orders[-1] += batch.tolist()
            sampler.advance(len(batch))
    return orders


@pytest.mark.parametrize(("trained", "drop_last"), [(0, False), (1, True), (2, False)])
@pytest.mark.parametrize("name", MAKERS)
def test_the_next_epochs_follow_those_before_the_checkpoint(
    tmp_path: Path, name: str, trained: int, drop_last: bool
) -> None:
    orders = epochs(ResumableSampler(MAKERS[name]()), range(1, 5), drop_last)
    sampler = ResumableSampler(MAKERS[name]())
    epochs(sampler, range(1, trained + 1), drop_last)
    torchfuse.save_checkpoint(tmp_path / "last.pt", sampler=sampler)
    resumed = ResumableSampler(MAKERS[name]())
    torchfuse.load_checkpoint(tmp_path / "last.pt", sampler=resumed)
    assert epochs(resumed, range(trained + 1, 5), drop_last) == orders[trained:]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "the state to be a dict, got NoneType"),
        ({"epoch": "x"}, "epoch to be a whole number, got 'x'"),
        ({"position": 1.5}, "position to be a whole number, got 1.5"),
        ({"position": 13}, "expected position to be from 0 to 12, got 13"),
        ({"generator": None}, "generator to be a generator's state, got: "),
        ({"generator": torch.zeros(3)}, "generator to be a generator's state, got: "),
    ],
)
def test_a_damaged_state_changes_nothing(bad: Any, message: str) -> None:
    sampler = ResumableSampler(MAKERS["random"]())
    list(sampler)
    sampler.advance(3)
    sampler.set_epoch(0)
    before = sampler.state_dict()
    rest = list(sampler)
    state = bad if bad is None else {**before, "position": 5, **bad}
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before
    assert list(sampler) == rest


def test_bad_input() -> None:
    for plain in (RandomSampler(DATA), BatchSampler(RandomSampler(DATA), 2, False)):
        with pytest.raises(
            ValueError, match=f"expected {type(plain).__name__} to have its own gen"
        ):
            ResumableSampler(plain)
    sampler = ResumableSampler(SequentialSampler(DATA))
    with pytest.raises(ValueError, match="from 0 to the 12 that are left in the epoch, got 13"):
        sampler.advance(13)
    with pytest.raises(
        TypeError, match=r"expected samples to be an int, got 2\.5\. Pass the batch"
    ):
        sampler.advance(2.5)  # type: ignore[arg-type]
    random = ResumableSampler(MAKERS["random"]())
    with pytest.raises(ValueError, match="of a sampler without a generator, such as Sequ"):
        ResumableSampler(MAKERS["sequential"]()).load_state_dict(random.state_dict())
    with pytest.raises(ValueError, match="to hold 'position', got \\['epoch'\\]"):
        sampler.load_state_dict({"epoch": 1})
    sampler.advance(torch.tensor(3))  # type: ignore[arg-type]
    state = sampler.state_dict()
    assert state == {"epoch": 0, "position": 3}
    assert type(state["position"]) is int


@pytest.mark.parametrize("name", MAKERS)
def test_an_epoch_that_nobody_announced_is_an_error(name: str) -> None:
    sampler = ResumableSampler(MAKERS[name]())
    loader = DataLoader(DATA, batch_size=4, sampler=sampler)
    for batch in loader:
        sampler.advance(len(batch))
    message = r"iterated again after \d+ samples of epoch 0 were counted"
    with pytest.raises(RuntimeError, match=message):
        list(loader)
    # What is left of a finished epoch is nothing, also after loading.
    resumed = ResumableSampler(MAKERS[name]())
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(0)
    assert list(resumed) == []
    with pytest.raises(RuntimeError, match=message):
        list(resumed)
    for each in (sampler, resumed):
        each.set_epoch(1)
    assert len(order := list(sampler)) == len(sampler)
    assert list(resumed) == order


def test_samples_that_a_loader_drops_hide_no_missing_call() -> None:
    sampler = ResumableSampler(RandomSampler(range(10), generator=torch.Generator()))  # type: ignore[arg-type]
    loader = DataLoader(DATA, batch_size=4, sampler=sampler, drop_last=True)
    for batch in loader:
        sampler.advance(len(batch))
    with pytest.raises(RuntimeError, match="was iterated again after"):
        list(loader)
    sampler.set_epoch(1)
    assert len(list(loader)) == 2


class Refuses:
    """A part that loads nothing."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("no")


def test_a_refused_load_leaves_the_generator(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = ResumableSampler(RandomSampler(range(8), generator=generator))
    sampler.set_epoch(0)
    next(iter(sampler))
    sampler.advance(1)
    torchfuse.save_checkpoint(tmp_path / "s.pt", sampler=sampler, z=Refuses())
    before = generator.get_state()
    with pytest.raises(ValueError, match="'z' does not fit: no"):
        torchfuse.load_checkpoint(tmp_path / "s.pt", sampler=sampler, z=Refuses())
    assert torch.equal(generator.get_state(), before)
