# SPDX-License-Identifier: BSD-3-Clause
"""What the rows of the suite `gpu` should take, computed before any of them was measured.

The time of a pass is the longer one of two: its bytes over a share of the copy speed, and its
instructions over the rate at which a GPU issues them. The share follows from the bytes that the
loads in flight of a multiprocessor's blocks ask for, and they from the registers that
tools/cubin/budget.json records for sm_90. Instructions are those of the loop that holds the vector
accesses in the machine code for sm_90, without accesses for other alignments. Each launch adds the
time until its blocks have begun and its last ones have ended.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_result
from page_tables import Maker, table

BUDGET = Path(__file__).resolve().parent.parent / "tools" / "cubin" / "budget.json"
ARCHITECTURE = 90
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048
THREADS = 256
VECTOR_BYTES = 16
#: Bytes per second of a copy, read and written: nine tenths of the data sheets' memory speed.
COPY = {"H100": 0.9 * 3.35e12, "H200": 0.9 * 4.8e12}
#: Bytes that loads of one multiprocessor must ask for to keep its share of the memory busy. A third
#: of them covers the latency on average: the share falls with the root of what is missing.
ENOUGH_IN_FLIGHT = 48 * 1024
#: Of the copy speed, where enough is in flight.
BEST_SHARE = 0.95
#: Bytes of the second-level cache of either, which may still hold what the pass before read last.
CACHE = 50e6
#: Instructions of a thread in a second: 132 multiprocessors with four warp schedulers at 1.755 GHz.
ISSUE_RATE = 132 * 4 * 32 * 1.755e9
#: Seconds that a launch adds.
LAUNCH = 4e-6
#: What a peer's passes reach of the copy speed, by published times of its large launches.
PEER_SHARE = 0.93


class Pass(NamedTuple):
    """One kernel over all elements; `vectors` are the 16-byte loads that a thread has in flight.

    `begins_with` are the bytes of each element that the pass before it read too, if it begins where
    that one ended. `blocks` are those on a multiprocessor, if the grid has fewer than fit there.
    """

    kernel: str
    bytes_per_element: float
    vectors: int
    launches: int = 1
    begins_with: float = 0.0
    instructions: float = 0.0
    blocks: float | None = None


class Prediction(NamedTuple):
    """One row: our passes, and the bytes and launches of its peer where they are known."""

    name: str
    elements: float
    passes: tuple[Pass, ...]
    peer: str = "torch"
    peer_bytes: float | None = None
    peer_launches: int = 1


NORM = Pass("multi_tensor_l2_norm<fp32>", 4, 4, instructions=8)
NORM_16 = Pass("multi_tensor_l2_norm<half>", 2, 4, instructions=6)
ADAM = Pass("fused_update<Adam, fp32, fp32, fp32>", 28, 4, instructions=53)
ADAM_MASTER = Pass("fused_update<Adam, bf16, bf16, fp32, master>", 28, 7, instructions=57)
ADAM_16 = Pass("fused_update<Adam, bf16, bf16, bf16>", 14, 4, instructions=57)
ADAM_FROM_THE_END = ADAM._replace(begins_with=4)
SGD = Pass("fused_update<Sgd, fp32, fp32, fp32>", 20, 3)
LAMB_MEASURE = Pass("fused_measure<Lamb, fp32, fp32, fp32>", 24, 4, instructions=62)
LAMB_UPDATE = Pass("fused_update<Lamb, fp32, fp32, fp32>", 16, 3)
UNSCALE = Pass("multi_tensor_unscale<fp32>", 8, 1)
LARGE, RESNET, BERT, XL = 2.0**26, 25.6e6, 158.8e6, 1.558e9
FUSED = "torch fused"


def _layer(
    name: str, size: str, dtype: str, forward: Sequence[Pass], backward: Sequence[Pass]
) -> list[Prediction]:
    """Both directions; sizes are those of the suite, "32x64x112x112"."""
    elements = float(math.prod(map(int, size.split("x"))))
    return [
        Prediction(
            name.format(direction=direction, dtype=dtype) + f"/{size}", elements, tuple(passes)
        )
        for direction, passes in (("forward", forward), ("backward", backward))
    ]


def _batch_norm(size: str, nhwc: bool, blocks: float | None = None) -> list[Prediction]:
    """Statistics and output; gradient sums and the input's gradient."""
    layout, walk = ("nhwc", "Rows") if nhwc else ("nchw", "Planes")
    name = f"batch_norm/{{direction}}/{{dtype}}/{layout}"
    counts = {"fp32": (21, 20, 35, 20), "bf16": (16, 15, 30, 20)}
    if not nhwc:
        counts = {"fp32": (42, 30, 60, 35), "bf16": (24, 20, 45, 30)}
    made = []
    for dtype, width in (("fp32", 4), ("bf16", 2)):
        # The machine code of both 16-bit types is the same for some kernels.
        stats, elemt, reduce, grads = (
            f"batch_norm_{kernel}<{dtype if dtype == 'fp32' or own else 'half'}, {walk}>"
            for kernel, own in (
                ("stats", not nhwc),
                ("elemt", False),
                ("backward_reduce", True),
                ("backward_elemt", not nhwc),
            )
        )
        of_stats, of_elemt, of_reduce, of_grads = counts[dtype]
        made += _layer(
            name,
            size,
            dtype,
            [
                Pass(stats, width, 4, instructions=of_stats, blocks=blocks),
                Pass(elemt, 2 * width, 2, instructions=of_elemt),
            ],
            [
                Pass(reduce, 2 * width, 4, instructions=of_reduce, blocks=blocks),
                Pass(grads, 3 * width, 4, instructions=of_grads),
            ],
        )
    return made


def _rows(size: str, vectors: int) -> list[Prediction]:
    """Layer normalization; RMS normalization should take as long."""
    made = []
    for layer in ("layer_norm", "rms_norm"):
        for dtype, kind, width in (("fp32", "fp32, fp32", 4), ("bf16", "half, half", 2)):
            made += _layer(
                f"{layer}/{{direction}}/{{dtype}}",
                size,
                dtype,
                [Pass(f"layer_norm<{kind}, 256u>", 2 * width, vectors)],
                [
                    Pass(f"layer_norm_grad_input<{kind}, false, 256u>", 3 * width, 2),
                    # With the totals, which are a launch of few blocks.
                    Pass(f"layer_norm_column_sums<{kind}, false>", 2 * width, 2, 2, blocks=2),
                ],
            )
    return made


def _cross_entropy(size: str) -> list[Prediction]:
    name, made = "cross_entropy/{direction}/{dtype}", []
    for dtype, kind, width, forward, backward in (
        ("fp32", "fp32", 4, 42, 57),
        ("bf16", "half", 2, 46, 54),
    ):
        there = Pass(f"softmax_cross_entropy<{dtype}, 256u>", width, 1, instructions=forward)
        back = Pass(
            f"softmax_cross_entropy_backward<{kind}, 256u>", 2 * width, 1, instructions=backward
        )
        made += _layer(name, size, dtype, [there], [back])
    return made


PREDICTIONS = (
    Prediction("step/large", LARGE, (ADAM,), FUSED, 28),
    Prediction("bf16_step/large", LARGE, (ADAM_16,), FUSED, 14),
    Prediction("masters/s0/large", LARGE, (ADAM_MASTER,), "torch fused, copies", 40, 3),
    Prediction("masters/s3/large", LARGE, (NORM_16, ADAM_MASTER), "torch fused, copies", 60, 10),
    Prediction("fp32/s3/resnet50", RESNET, (NORM, ADAM), FUSED, 48, 8),
    Prediction("scale_clip_step/resnet50", RESNET, (NORM, ADAM), FUSED, 48, 8),
    Prediction("norm_and_check/gpt2_xl", XL, (NORM,), "get_total_norm", 4, 3),
    Prediction("unscale/large", LARGE, (UNSCALE,), "torch", 8),
    Prediction(
        "lamb/step/bert_large_10_layers", BERT, (NORM, LAMB_MEASURE, LAMB_UPDATE), "torch foreach"
    ),
    Prediction("sgd/scale_clip/bert_large_10_layers", BERT, (NORM, SGD), FUSED, 40, 8),
    *_batch_norm("32x64x112x112", nhwc=False),
    *_batch_norm("32x64x112x112", nhwc=True),
    # Grids of 256 and of 128 blocks, where three fit on each of 132 multiprocessors.
    *_batch_norm("32x256x56x56", nhwc=False, blocks=256 / 132),
    *_batch_norm("32x256x56x56", nhwc=True),
    *_batch_norm("32x2048x7x7", nhwc=False, blocks=128 / 132),
    *_batch_norm("32x2048x7x7", nhwc=True),
    *_rows("4096x1024", vectors=1),
    *_rows("512x8192", vectors=4),
    *_cross_entropy("4096x50257"),
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
    fit = min(REGISTERS_PER_SM // (registers(one.kernel) * THREADS), THREADS_PER_SM // THREADS)
    blocks = fit if one.blocks is None else min(fit, one.blocks)
    return int(blocks * THREADS * one.vectors * VECTOR_BYTES)


def share(one: Pass) -> float:
    """Of the copy speed."""
    return BEST_SHARE * math.sqrt(min(1.0, in_flight(one) / ENOUGH_IN_FLIGHT))


def memory_bytes(one: Pass, elements: float) -> float:
    """Bytes that a pass moves to and from memory, at best."""
    return one.bytes_per_element * elements - min(CACHE, one.begins_with * elements)


def seconds(prediction: Prediction, gpu: str) -> float:
    """Of our step on the device, the host not counted."""
    total = 0.0
    for one in prediction.passes:
        stream = memory_bytes(one, prediction.elements) / (share(one) * COPY[gpu])
        issue = one.instructions * prediction.elements / ISSUE_RATE
        total += max(stream, issue) + LAUNCH * one.launches
    return total


def peer_seconds(prediction: Prediction, gpu: str) -> float | None:
    """Of the peer's step on the device, if its passes are known."""
    if prediction.peer_bytes is None:
        return None
    stream = prediction.peer_bytes * prediction.elements / (PEER_SHARE * COPY[gpu])
    return stream + LAUNCH * prediction.peer_launches


def microseconds(row: str, gpu: str) -> float | None:
    """Of a row of the suite `gpu` on a card with this name."""
    for card in COPY:
        for one in PREDICTIONS:
            if one.name == row and card in gpu:
                return 1e6 * seconds(one, card)
    return None


def _microseconds(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g} µs"


def _measured(row: str) -> list[str]:
    """What a GPU took, its share of the copy's speed, and the peer's time over ours."""
    found = gpu_result.latest()
    if found is None:
        return []
    figures = gpu_result.rows(found).get(row)
    if figures is None:
        return ["", "", ""]
    ours, *peers = (us for name, us in figures["us"].items() if name != "copy")
    ratio = f"{peers[0] / ours:.2f}" if peers else ""
    return [_microseconds(ours), f"{100 * figures['share']:.0f} %", ratio]


def gpu_predictions(_: object = None) -> str:
    """A row for each prediction, beside what was measured, if anything was."""
    rows = []
    for one in PREDICTIONS:
        peer = peer_seconds(one, "H100")
        rows.append(
            [
                f"`{one.name}`",
                f"{sum(memory_bytes(p, one.elements) for p in one.passes) / one.elements:.3g}",
                " + ".join(str(in_flight(part) // 1024) for part in one.passes),
                " + ".join(f"{p.instructions:g}" if p.instructions else "?" for p in one.passes),
                *(_microseconds(1e6 * seconds(one, gpu)) for gpu in COPY),
                "" if peer is None else f"{peer / seconds(one, 'H100'):.2f}",
                *_measured(one.name),
            ]
        )
    head = ["row", "bytes", "KB in flight", "instructions", *COPY, "predicted ratio"]
    found = gpu_result.latest()
    if found is not None:
        head += [f"measured, {found[1]['machine']['gpu']}", "of a copy", "measured ratio"]
    return table(head, rows, range(1, len(head)))


TABLES: dict[str, Maker] = {"gpu-predictions": gpu_predictions}
