# SPDX-License-Identifier: BSD-3-Clause
"""torch.library.opcheck on the operators of batch normalization, and their errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import torchfuse  # noqa: F401  registers the operators

OPS = torch.ops.torchfuse
RULE = {"momentum": 0.1, "eps": 1e-5}


def tensors(dtype: torch.dtype, channels_last: bool, device: str) -> dict[str, Tensor]:
    memory = torch.channels_last if channels_last else torch.contiguous_format
    shape = (4, 6, 5, 3)

    def make() -> Tensor:
        return torch.randn(shape, device=device).to(dtype).contiguous(memory_format=memory)

    vectors = [torch.rand(6, device=device) for _ in range(4)]
    names = ("weight", "bias", "running_mean", "running_var")
    x = make()
    return {
        "x": x,
        "z": make(),
        "grad": make(),
        "packed": OPS.batch_norm_stats(x),
        "batches": torch.tensor(3, device=device),
        **dict(zip(names, vectors, strict=True)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(channels_last: bool, dtype: torch.dtype, device: str) -> None:
    t = tensors(dtype, channels_last, device)
    statistics = (t["running_mean"], t["running_var"])
    opcheck(OPS.batch_norm_stats.default, (t["x"],))
    elemt = OPS.batch_norm_elemt.default
    trained = (t["x"], t["weight"], t["bias"], t["packed"], *statistics, t["batches"], t["z"])
    opcheck(elemt, trained, {**RULE, "relu": True})
    opcheck(elemt, (t["x"], None, None, None, *statistics, None, None), RULE)
    y, saved = elemt(*trained, **RULE, relu=True)
    for gate, relu in ((y, True), (None, True), (None, False)):
        arguments = (t["grad"], t["x"], saved, t["weight"], t["bias"])
        opcheck(OPS.batch_norm_backward_reduce.default, (*arguments, gate), {"relu": relu})
    sums = torch.randn(12, dtype=torch.float64, device=device)
    opcheck(
        OPS.batch_norm_backward_elemt.default,
        (t["grad"], t["x"], saved, sums, t["weight"], t["bias"]),
        {"relu": True},
    )


def test_fake_tensors_have_the_strides_of_real_ones() -> None:
    """Of slices, of tensors with one channel or one pixel, and of those that are copied."""
    base = torch.randn(4, 10, 7, 8)
    views = [base, base[:, 2:8], base[:, :1], base[:, :, :1, :1], base[:, :, :, ::2], base[::2]]
    views += [view.contiguous(memory_format=torch.channels_last) for view in views]
    views += [base.contiguous(memory_format=torch.channels_last)[:, 2:8], base.transpose(0, 1)]
    views += [base.transpose(2, 3), base[0, :, :, 0].t()]
    for view in views:
        arguments = (None, None, OPS.batch_norm_stats(view), None, None, None, None)
        real, _ = OPS.batch_norm_elemt(view, *arguments, **RULE)
        on_meta = (
            view.to("meta")
            if view.is_contiguous()
            else torch.empty_strided(view.shape, view.stride(), device="meta")
        )
        packed = arguments[2]
        assert packed is not None
        meta = (None, None, packed.to("meta"), None, None, None, None)
        fake, _ = OPS.batch_norm_elemt(on_meta, *meta, **RULE)
        assert fake.stride() == real.stride(), (view.shape, view.stride())


BAD: dict[str, tuple[Any, str]] = {
    "one dimension": (
        lambda t: OPS.batch_norm_stats(torch.randn(3)),
        r"batch_norm_stats: expected input to have at least 2 dimensions, samples and channels, "
        r"got \[3\]",
    ),
    "no channel": (
        lambda t: OPS.batch_norm_stats(torch.randn(3, 0)),
        r"batch_norm_stats: expected input to have at least one channel, got \[3, 0\]",
    ),
    "integers": (
        lambda t: OPS.batch_norm_stats(torch.ones(3, 2, dtype=torch.int32)),
        r"batch_norm_stats: expected input to be of dtype float32, .*, got Int",
    ),
    "packed of other channels": (
        lambda t: OPS.batch_norm_elemt(
            t["x"], None, None, torch.zeros(21, dtype=torch.float64), *[None] * 4, **RULE
        ),
        r"batch_norm_elemt: expected packed to hold 25 contiguous numbers of dtype double on cpu, "
        r"got 21 of dtype Double",
    ),
    "no statistics": (
        lambda t: OPS.batch_norm_elemt(t["x"], *[None] * 7, **RULE),
        r"batch_norm_elemt: expected running_mean and running_var to be tensors where there is no "
        r"packed, got none",
    ),
    "weight's shape": (
        lambda t: OPS.batch_norm_elemt(
            t["x"], t["weight"][:5], None, t["packed"], *[None] * 4, **RULE
        ),
        r"batch_norm_elemt: expected weight to be a contiguous tensor of shape \[6\], the channels "
        r"of input, got one of shape \[5\]",
    ),
    "gradient's sizes": (
        lambda t: OPS.batch_norm_backward_elemt(
            t["grad"][:2],
            t["x"],
            torch.zeros(13, dtype=torch.float64),
            torch.zeros(12, dtype=torch.float64),
            None,
            None,
        ),
        r"batch_norm_backward_elemt: expected grad_output to have the sizes of input",
    ),
    "gradient's dtype": (
        lambda t: OPS.batch_norm_backward_reduce(
            t["grad"].double(), t["x"], torch.zeros(13, dtype=torch.float64), None, None, None
        ),
        r"batch_norm_backward_reduce: expected grad_output to be of the dtype of input, Float",
    ),
    "output without relu": (
        lambda t: OPS.batch_norm_backward_reduce(
            t["grad"], t["x"], torch.zeros(13, dtype=torch.float64), None, None, t["x"]
        ),
        r"batch_norm_backward_reduce: expected output to be given with relu alone",
    ),
    "unknown group": (
        lambda t: OPS.all_reduce_sum_(t["packed"], "nobody", "layer"),
        r"layer: expected group to name a process group that exists, got 'nobody'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, message = BAD[name]
    t = tensors(torch.float32, False, "cpu")
    with pytest.raises(RuntimeError, match=message):
        call(t)
