# SPDX-License-Identifier: BSD-3-Clause
"""What a training step costs on many GPUs, on paper: from times of a CPU and from data sheets.

Nothing here was measured on a GPU. A figure is measured by benchmarks/scale.py, or computed from
numbers of bytes and messages with the constants below.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SUITES = Path(__file__).resolve().with_name("suites")
REPLICAS = (1, 8, 1000)
#: GPUs of a node, which NVLink connects.
NODE = 8
#: Bytes per second, from data sheets: memory of an H200, NVLink of the fourth generation in one
#: direction, and a network card of 400 Gbit/s for each GPU.
MEMORY = 4.8e12
NVLINK = 450e9
NETWORK = 50e9
#: Seconds of one message between two GPUs. No data sheet has it: an assumption.
MESSAGE = 5e-6
#: Of DistributedDataParallel.
BUCKET = 25 * 2**20
ADAM_BYTES, GRADIENT_BYTES = 28, 4

COMPUTED, ASSUMED = "computed", "computed, assumed latency"

#: Seconds for a number of GPUs.
Cost = Callable[[int], float]


class Model(NamedTuple):
    """Parameters, and channels of each batch normalization."""

    tensors: int
    numel: int
    norms: list[int]


class Part(NamedTuple):
    """A row: a part of a step, how it grows, its seconds and where they come from."""

    name: str
    grows: str
    seconds: list[float]
    source: str


def model(name: str) -> Model:
    """A parameter set of the suites.

    A norm has a weight and a bias of its channels. The only other vector of ResNet-50 is the bias
    of its last layer, and there is one of it.
    """
    entries = json.loads((SUITES / f"{name}.json").read_text(encoding="utf-8"))["tensors"]
    vectors = [entry for entry in entries if len(entry["shape"]) == 1 and entry["count"] > 1]
    return Model(
        sum(entry["count"] for entry in entries),
        sum(entry["count"] * math.prod(entry["shape"]) for entry in entries),
        [entry["shape"][0] for entry in vectors for _ in range(entry["count"] // 2)],
    )


def bandwidth(replicas: int) -> float:
    """Of the slowest link between the GPUs."""
    return NVLINK if replicas <= NODE else NETWORK


def ring(replicas: int) -> float:
    """Messages of an all-reduce one after another, where each GPU sends to the next one."""
    return 2.0 * (replicas - 1)


def tree(replicas: int) -> float:
    """The same where sums go up a tree and the result down."""
    return 2.0 * math.ceil(math.log2(replicas))


def sent(size: float, replicas: int) -> float:
    """Seconds to send what an all-reduce of that many bytes sends from each GPU."""
    return 2 * (replicas - 1) / replicas * size / bandwidth(replicas)


def interpolated(points: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds at a size between two measured ones, on the line between them in a log-log chart.

    Raises:
        ValueError: the size is outside of what was measured.
    """
    for (low, first), (high, last) in itertools.pairwise(points):
        if low <= size <= high:
            share = math.log(size / low) / math.log(high / low)
            return float(first * (last / first) ** share)
    raise ValueError(f"expected points around {size}, got {[point[0] for point in points]}")


def host(result: dict[str, Any], contender: str, tensors: int) -> float:
    """Seconds of an Adam step of small tensors on this CPU: nearly all of it is the host's work."""
    cases = [case for case in result["cases"] if case["curve"] == "tensors/adam_float32"]
    points = [(case["size"], case["seconds"][contender]["median"]) for case in cases]
    return interpolated(points, tensors)


def always(seconds: float) -> Cost:
    """What does not depend on the number of GPUs."""
    return lambda _: seconds


def messages(count: Cost, collectives: float) -> Cost:
    """Of so many collectives, one after another; `count` has the messages of each."""
    return lambda replicas: collectives * count(replicas) * MESSAGE


def _row(name: str, grows: str, cost: Cost, source: str) -> Part:
    return Part(name, grows, [cost(replicas) for replicas in REPLICAS], source)


def language_model(result: dict[str, Any]) -> list[Part]:
    """GPT-2 XL in fp32 with Adam."""
    gpt = model("gpt2_xl")
    gradients = GRADIENT_BYTES * gpt.numel
    buckets = math.ceil(gradients / BUCKET)
    device = ADAM_BYTES * gpt.numel / MEMORY
    hosts = {name: host(result, name, gpt.tensors) for name in ("torchfuse", "torch fused")}
    return [
        *(
            _row(f"host of the optimizer, {name}", "tensors", always(seconds), "measured, CPU")
            for name, seconds in hosts.items()
        ),
        _row("Adam on every GPU", "elements", always(device), COMPUTED),
        _row("Adam, sharded", "elements / n", lambda n: device / n, COMPUTED),
        _row("gradients, bytes", "2 (n - 1) / n", lambda n: sent(gradients, n), COMPUTED),
        _row("gradients, messages in rings", "n", messages(ring, buckets), ASSUMED),
        _row("gradients, messages in trees", "log n", messages(tree, buckets), ASSUMED),
        _row("one flag or norm, in a tree", "log n", messages(tree, 1), ASSUMED),
    ]


def batch_norms() -> list[Part]:
    """SyncBatchNorm in ResNet-50: ours sends fp64 sums, torch gathers fp32 from every rank."""
    norms = model("resnet50").norms
    layers, channels = len(norms), sum(norms)
    reduced = 8 * (4 * channels + layers) + 8 * 2 * channels
    gathered, backward = 4 * (2 * channels + layers), 4 * 2 * channels

    def torch_bytes(replicas: int) -> float:
        received = (replicas - 1) * gathered / bandwidth(replicas)
        return received + sent(backward, replicas)

    return [
        _row("messages, torchfuse", "log n", messages(tree, 2 * layers), ASSUMED),
        _row("bytes, torchfuse", "2 (n - 1) / n", lambda n: sent(reduced, n), COMPUTED),
        # An all-gather needs half of the messages of an all-reduce.
        _row("messages, torch", "log n", messages(tree, 1.5 * layers), ASSUMED),
        _row("bytes, torch", "n", torch_bytes, COMPUTED),
    ]
