# SPDX-License-Identifier: BSD-3-Clause
"""What split states and gradients cost on many GPUs, on paper: memory, bytes and messages.

Nothing here was measured. The constants of links, memory and messages are those of scale_paper.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import scale_paper
from curves import duration
from page_tables import Maker, table

RANKS = (8, 64, 1024)
#: Bytes of an element: bf16 parameters and gradients; a master and two moments in fp32.
PARAM, GRAD, STATES = 2, 2, 12
#: What a step moves of an element: gradient and states read, states and the parameter written.
STEP = GRAD + 2 * STATES + PARAM
#: Layers of GPT-2 XL, each of which FSDP2 gathers and reduces alone, and one for the rest.
LAYERS = 48 + 1
GIB = 2**30


class Form(NamedTuple):
    """How training is split: shares of memory, and what a step sends from each GPU."""

    gradients: bool  #: whether each GPU keeps its part of the gradients alone
    states: bool
    parameters: bool
    #: Bytes of an element that rings move, each times (n - 1) / n: a reduce-scatter or an
    #: all-gather moves all elements once, an all-reduce twice.
    moved: int
    #: Such passes around the ring, one after another, of a model with so many buckets.
    passes: Callable[[int], int]


FORMS: Mapping[str, Form] = {
    "data parallelism": Form(False, False, False, 2 * GRAD, lambda buckets: 2 * buckets),
    "ZeRO stage 1": Form(False, True, False, 2 * GRAD + PARAM, lambda buckets: 2 * buckets + 1),
    # Each bucket of gradients is a flat tensor of parameters too, and gathered alone.
    "ZeRO stage 2": Form(True, True, False, GRAD + PARAM, lambda buckets: 2 * buckets),
    # Parameters are gathered for forward, and again for backward.
    "FSDP2": Form(True, True, True, GRAD + 2 * PARAM, lambda _: 3 * LAYERS),
}


def _model() -> tuple[int, int]:
    """Elements, and buckets of their gradients."""
    numel = scale_paper.model("gpt2_xl").numel
    return numel, math.ceil(GRAD * numel / scale_paper.BUCKET)


def memory(form: Form, ranks: int) -> float:
    """Bytes of a GPU that stay for the whole step; buckets and gathered layers come on top."""
    numel, _ = _model()
    sizes = ((PARAM, form.parameters), (GRAD, form.gradients), (STATES, form.states))
    return sum(size * numel / (ranks if split else 1) for size, split in sizes)


def bytes_sent(form: Form, ranks: int) -> float:
    """Bytes that each GPU sends in a step."""
    return form.moved * _model()[0] * (ranks - 1) / ranks


def message_time(form: Form, ranks: int) -> float:
    """Seconds of messages around rings, one after another, at the assumed latency."""
    return form.passes(_model()[1]) * (ranks - 1) * scale_paper.MESSAGE


def update_time(form: Form, ranks: int) -> float:
    """Seconds of the optimizer's bytes."""
    return STEP * _model()[0] / (ranks if form.states else 1) / scale_paper.MEMORY


def limit(form: Form) -> float:
    """Number of GPUs from which a step's messages take longer than its bytes, over the network."""
    numel, buckets = _model()
    size = form.moved * numel / scale_paper.NETWORK
    return size / (form.passes(buckets) * scale_paper.MESSAGE)


def _sizes(value: float) -> str:
    return f"{value / GIB:#.3g}".rstrip(".") + " GiB"


def _by_ranks(cell: Callable[[Form, int], str]) -> str:
    head = ["training", *(f"{ranks:,} GPUs" for ranks in RANKS)]
    rows = [[name, *(cell(form, ranks) for ranks in RANKS)] for name, form in FORMS.items()]
    return table(head, rows, range(1, len(head)))


def _times(form: Form, ranks: int) -> list[str]:
    sent = bytes_sent(form, ranks) / scale_paper.bandwidth(ranks)
    return [duration(t) for t in (sent, message_time(form, ranks), update_time(form, ranks))]


def times() -> str:
    """Rows by form and number of GPUs."""
    rows = [
        [name, f"{ranks:,}", _sizes(bytes_sent(form, ranks)), *_times(form, ranks)]
        for name, form in FORMS.items()
        for ranks in RANKS
    ]
    head = ["training", "GPUs", "sent by each", "bytes", "messages in rings", "update"]
    return table(head, rows, range(1, len(head)))


def limits() -> str:
    """Where the messages of each form outgrow its bytes."""
    rows = [
        [name, f"{form.passes(_model()[1]):,}", f"{limit(form):,.0f}"]
        for name, form in FORMS.items()
    ]
    return table(["training", "passes around the ring", "GPUs"], rows, range(1, 3))


TABLES: dict[str, Maker] = {
    "sharding-memory": lambda _: _by_ranks(lambda form, ranks: _sizes(memory(form, ranks))),
    "sharding-times": lambda _: times(),
    "sharding-limits": lambda _: limits(),
}
