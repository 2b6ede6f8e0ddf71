# SPDX-License-Identifier: BSD-3-Clause
"""What a gather that fails leaves to those who use the parameters next."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse.parallel import _gather
from torchfuse.parallel._partition import Flat, Partition, move_into

CLOSED = "got in rank 0: Connection closed by peer"


class Message:
    """The other rank's part, which arrives when somebody waits."""

    def __init__(self, part: Tensor, value: float, arrives: Callable[[], None]) -> None:
        self.part, self.value, self.arrives, self.ended = part, value, arrives, False

    def wait(self) -> None:
        self.arrives()
        self.part.fill_(self.value)
        self.ended = True

    def is_completed(self) -> bool:
        return self.ended


class Pair:
    """Two ranks, of which this process is the first."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def nothing() -> None:
    pass


def closed() -> None:
    raise RuntimeError("Connection closed by peer")


class Model:
    """Three layers, of which the other rank has a half each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        params = list(self.net.parameters())
        members = [[0, 1], [2, 3], [4, 5]]
        partition = Partition.of(params, 0, 2, members)
        flats = partition.zeros()
        move_into(flats, partition, params)
        self.optimizer: Any = torch.optim.SGD(params)
        group: Any = Pair()
        self.gathers = _gather.Gathers(
            flats, partition, group, list(self.net), members, self.optimizer
        )
        self.value = 0.0
        self.arrives = [nothing] * 3
        self.begins = [nothing] * 3
        self.messages: list[Message] = []
        monkeypatch.setattr(_gather, "begin_gather", self.begin)

    def begin(self, tensor: Tensor, flat: Flat, *_: Any) -> list[Any]:
        index = len(self.messages) % 3
        self.messages.append(Message(tensor[flat.part :], self.value, self.arrives[index]))
        self.begins[index]()
        return [self.messages[-1]]

    def run(self, value: float) -> None:
        """A gather of which nothing has arrived yet: all layers have run before."""
        self.value = value
        self.messages.clear()
        for layer in self.net:
            layer(torch.ones(8))
        self.gathers.run()

    def biases(self) -> list[float]:
        """The last elements of the layers, which are of the other rank."""
        return [float(layer.bias.detach()[-1]) for layer in self.net]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(monkeypatch)


def fail_in_the_second(model: Model) -> None:
    model.run(1)
    model.arrives[1] = closed
    model.run(2)
    with pytest.raises(RuntimeError, match=CLOSED):
        model.net(torch.ones(8))


def test_a_gather_that_failed_fails_again(model: Model) -> None:
    fail_in_the_second(model)
    assert model.biases() == [2, 1, 1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=CLOSED):
            model.net.state_dict()
        with pytest.raises(RuntimeError, match=CLOSED):
            model.gathers.finish()
    assert model.biases() == [2, 1, 2], "what does not fail has arrived"


def test_after_a_failure_the_model_can_be_loaded(model: Model) -> None:
    fail_in_the_second(model)
    model.net.load_state_dict(
        {name: torch.full_like(param, 7) for name, param in model.net.named_parameters()}
    )
    assert model.biases() == [7, 7, 7]
    with pytest.raises(RuntimeError, match=CLOSED):
        model.gathers.finish()
    assert model.biases() == [7, 7, 7], "nothing arrives after the load"
    model.optimizer = None
    gc.collect()
    assert model.net(torch.ones(8)).shape == (8,), "the optimizer is gone"


def test_what_was_not_begun_fails_again(model: Model) -> None:
    model.run(1)
    model.begins[1] = closed
    with pytest.raises(RuntimeError, match=CLOSED):
        model.run(2)
    assert [message.ended for message in model.messages] == [True, False]
    assert model.biases() == [2, 1, 1]
    for layer in (1, 2):
        with pytest.raises(RuntimeError, match=CLOSED):
            model.net[layer](torch.ones(8))


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_between_gathers_is_remembered(model: Model) -> None:
    model.run(1)
    model.begins[1] = interrupt
    with pytest.raises(KeyboardInterrupt):
        model.run(2)
    with pytest.raises(
        RuntimeError, match=r"^SGD: expected the gather of what each has updated to "
    ):
        model.net(torch.ones(8))
    assert model.biases() == [2, 1, 1]


def test_all_threads_wait_for_what_one_of_them_waits_for(model: Model) -> None:
    begun, released = threading.Event(), threading.Event()

    def arrive() -> None:
        begun.set()
        assert released.wait(60)

    model.run(1)
    model.arrives[0] = arrive
    found: list[list[float]] = []

    def read() -> None:
        model.net[0].state_dict()
        found.append(model.biases()[:1])

    model.gathers.finish()
    model.run(2)
    threads = [threading.Thread(target=read) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.05)
    assert found == []
    released.set()
    for thread in threads:
        thread.join()
    assert found == [[2], [2]]


def test_a_broadcast_that_cannot_begin_waits_for_those_that_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Message] = []

    def broadcast(data: Tensor, group_src: int, **_: Any) -> Message:
        if group_src == 1:
            closed()
        begun.append(Message(data, 0, nothing))
        return begun[-1]

    monkeypatch.setattr(dist, "broadcast", broadcast)
    param = nn.Parameter(torch.ones(4))
    partition = Partition.of([param], 0, 2, [[0]])
    group: Any = Pair()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
        _gather.begin_gather(*partition.zeros(), partition.flats[0], 0, group)
    assert [message.ended for message in begun] == [True]
