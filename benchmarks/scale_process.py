# SPDX-License-Identifier: BSD-3-Clause
"""What benchmarks/scale.py starts under torchrun: batch normalization over this run's processes.

Rank 0 writes the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import torch
import torch.distributed as dist

from suites import scale_norms
from suites.contenders import OURS
from suites.scale_points import calls_for, measured, timed_once


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def same_on_all_ranks(calls: dict[str, int]) -> dict[str, int]:
    """Rank 0's numbers of calls: all ranks must exchange equally often."""
    values = torch.tensor(list(calls.values()))
    dist.broadcast(values, 0)
    return dict(zip(calls, map(int, values), strict=True))


def slowest(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each sample the longest time that a rank had.

    Where processes share a processor, one rank may be done before another one begins.
    """
    values = torch.tensor(list(samples.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(samples, values.tolist(), strict=True))


def main() -> None:
    """Joins the group and measures."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = scale_norms.QUICK_SHAPE if arguments.quick else scale_norms.SHAPE
    names = (OURS, scale_norms.PEER, scale_norms.ALONE)
    runs = {name: scale_norms.make(name, shape, arguments.seed) for name in names}
    verified = scale_norms.verify(runs)
    calls = same_on_all_ranks({name: calls_for(timed_once(run)) for name, run in runs.items()})
    # A rank that is late would be waited for in another's sample.
    figures = measured(runs, calls, arguments.rounds, setup=dist.barrier)
    figures["samples"] = slowest(figures["samples"])
    if dist.get_rank() == 0:
        text = json.dumps({"verified": verified, "shape": shape, **figures})
        arguments.out.write_text(text, encoding="utf-8")
    del runs
    gc.collect()  # layers that refer to their groups
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
