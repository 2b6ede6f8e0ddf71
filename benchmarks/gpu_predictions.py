# SPDX-License-Identifier: BSD-3-Clause
"""What steps should take on a GPU, computed before any of them was measured on one.

The time of a pass is its bytes over a share of the copy speed. The share follows from the bytes
that the loads in flight of a multiprocessor's blocks ask for, and they from the registers that
tools/cubin/budget.json records for sm_90. Launches that wait for each other add a gap each.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from page_tables import Maker, table

BUDGET = Path(__file__).resolve().parent.parent / "tools" / "cubin" / "budget.json"
ARCHITECTURE = 90
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048
THREADS = 256
VECTOR_BYTES = 16
#: Bytes per second of a copy, read and written: nine tenths of the data sheets' memory speed.
COPY = {"H100": 0.9 * 3.35e12, "H200": 0.9 * 4.8e12}
#: Bytes that loads of one multiprocessor must ask for to keep its share of the memory busy.
ENOUGH_IN_FLIGHT = 48 * 1024
#: Of the copy speed, where enough is in flight.
BEST_SHARE = 0.95
#: Bytes of the second-level cache of either, which may still hold what the pass before read last.
CACHE = 50e6
#: Seconds between launches of which each waits for the one before it.
GAP = 4e-6
#: What a peer's passes reach of the copy speed, by published times of its large launches.
PEER_SHARE = 0.93


class Pass(NamedTuple):
    """One kernel over all elements; `vectors` are the 16-byte loads that a thread has in flight.

    `begins_with` are the bytes of each element that the pass before it read too, if it begins where
    that one ended.
    """

    kernel: str
    bytes_per_element: float
    vectors: int
    launches: int = 1
    begins_with: float = 0.0


class Prediction(NamedTuple):
    """One step of ours, and the bytes and launches of its peer."""

    name: str
    elements: float
    passes: tuple[Pass, ...]
    peer: str
    peer_bytes: float
    peer_launches: int


NORM = Pass("multi_tensor_l2_norm<fp32>", 4, 4)
NORM_16 = Pass("multi_tensor_l2_norm<half>", 2, 4)
ADAM = Pass("fused_update<Adam, fp32, fp32, fp32>", 28, 4)
ADAM_MASTER = Pass("fused_update<Adam, bf16, bf16, fp32, master>", 28, 7)
ADAM_16 = Pass("fused_update<Adam, bf16, bf16, bf16>", 14, 4)
ADAM_FROM_THE_END = ADAM._replace(begins_with=4)
SGD = Pass("fused_update<Sgd, fp32, fp32, fp32>", 20, 3)
LAMB_MEASURE = Pass("fused_measure<Lamb, fp32, fp32, fp32>", 24, 4)
LAMB_UPDATE = Pass("fused_update<Lamb, fp32, fp32, fp32>", 16, 3)
BILLION, RESNET, BERT = 1e9, 25.6e6, 336e6
FUSED = "torch fused"

PREDICTIONS = (
    Prediction("Adam, fp32", BILLION, (ADAM,), FUSED, 28, 1),
    Prediction("Adam, fp32, unscaling and clipping", BILLION, (NORM, ADAM), FUSED, 48, 8),
    Prediction(
        "Adam, bf16 with fp32 masters, the same",
        BILLION,
        (NORM_16, ADAM_MASTER),
        "torch fused, copies",
        60,
        10,
    ),
    Prediction("Adam, all bf16", BILLION, (ADAM_16,), FUSED, 14, 1),
    Prediction("SGD with momentum, unscaling and clipping", BILLION, (NORM, SGD), FUSED, 40, 8),
    Prediction(
        "LAMB, BERT-large", BERT, (NORM, LAMB_MEASURE, LAMB_UPDATE), "apex structure", 52, 12
    ),
    Prediction("Adam, fp32, unscaling and clipping, ResNet-50", RESNET, (NORM, ADAM), FUSED, 48, 8),
    Prediction(
        "the same, the update from the end", RESNET, (NORM, ADAM_FROM_THE_END), FUSED, 48, 8
    ),
    Prediction("norm and check", BILLION, (NORM,), "get_total_norm", 4, 3),
)


@functools.cache
def _budget(path: Path) -> dict[str, Any]:
    budget: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return budget


def registers(kernel: str) -> int:
    """Those of a kernel for aligned operands on sm_90.

    Raises:
        ValueError: the budget has no such kernel.
    """
    budget = _budget(BUDGET)
    if kernel not in budget["kernels"]:
        raise ValueError(f"expected {kernel} in {BUDGET.name}, got none.")
    place = budget["architectures"].index(ARCHITECTURE)
    return int(budget["kernels"][kernel]["registers"][place])


def in_flight(one: Pass) -> int:
    """Bytes that the resident blocks of a multiprocessor ask for at once."""
    blocks = min(REGISTERS_PER_SM // (registers(one.kernel) * THREADS), THREADS_PER_SM // THREADS)
    return blocks * THREADS * one.vectors * VECTOR_BYTES


def share(one: Pass) -> float:
    """Of the copy speed."""
    return BEST_SHARE * min(1.0, in_flight(one) / ENOUGH_IN_FLIGHT)


def memory_bytes(one: Pass, elements: float) -> float:
    """Bytes that a pass moves to and from memory, at best."""
    return one.bytes_per_element * elements - min(CACHE, one.begins_with * elements)


def seconds(prediction: Prediction, gpu: str) -> float:
    """Of our step on the device, the host not counted."""
    streams = sum(
        memory_bytes(one, prediction.elements) / (share(one) * COPY[gpu])
        for one in prediction.passes
    )
    return streams + GAP * (sum(one.launches for one in prediction.passes) - 1)


def peer_seconds(prediction: Prediction, gpu: str) -> float:
    """Of the peer's step on the device."""
    stream = prediction.peer_bytes * prediction.elements / (PEER_SHARE * COPY[gpu])
    return stream + GAP * (prediction.peer_launches - 1)


def gpu_predictions(_: object = None) -> str:
    """A row for each prediction."""
    rows = []
    for one in PREDICTIONS:
        ours = {gpu: seconds(one, gpu) for gpu in COPY}
        ratio = peer_seconds(one, "H200") / ours["H200"]
        rows.append(
            [
                one.name,
                f"{one.elements / 1e6:,.4g} M",
                f"{sum(memory_bytes(p, one.elements) for p in one.passes) / one.elements:.3g}",
                " + ".join(str(in_flight(part) // 1024) for part in one.passes),
                *(f"{1e3 * ours[gpu]:.3g} ms" for gpu in COPY),
                one.peer,
                f"{one.peer_bytes:g}",
                f"{ratio:.2f}",
            ]
        )
    head = ["step", "elements", "bytes", "KB in flight", *COPY, "against", "its bytes", "ratio"]
    return table(head, rows, range(1, 6))


TABLES: dict[str, Maker] = {"gpu-predictions": gpu_predictions}
