# SPDX-License-Identifier: BSD-3-Clause
"""Steps whose states are split over Gloo processes: ours, torch's ZeRO and FSDP2 with torch fused.

Example:
    python benchmarks/sharded.py
    python benchmarks/sharded.py --only tensors_400 --quick

Every contender ends with all parameters on all ranks. One of ours is stage 2 of ZeRO, whose
gradients are split too: the table has the bytes of gradients that a step finds on each rank.
Another leaves out what peers do not do: to compare the ranks' options and gradients before each
step. Ours is also compared with its parts, one after the other in one sample: the step of a rank's
elements, and the gather of all. Each is timed alone too; the gather is faster there, because no
rank is late and the caches still have what the last one sent.
A sample is the slowest rank's.
Run it on a quiet machine with at least two processors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import environment
import launch
import result_file
from contender_table import row
from torchfuse.testing.bench import summarize

RESULT_FORMAT = 1
PROCESSES = 2
SETS = ("resnet50", "tensors_400")
SUBJECT, AGAIN, SPLIT = "torchfuse", "torchfuse, again", "torchfuse, gradients split"
NOT_COMPARED = "torchfuse, ranks not compared"
PART, GATHER = "step of a part", "gather"
PARTS = f"{PART}, then {GATHER}"
ZERO, FSDP = "ZeroRedundancyOptimizer", "FSDP2, torch fused"
PEERS = (AGAIN, SPLIT, NOT_COMPARED, ZERO, FSDP)
#: Upper limit on our step, as a share of its parts, and lower limit on a peer's, as one of ours.
PARTS_TARGET, PEER_TARGET = 1.1, 0.97


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SETS, help="measure this parameter set alone")
    parser.add_argument("--quick", action="store_true", help="three rounds; judges nothing")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--rounds", type=int, help="default 45; with --quick 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file; default: build/benchmarks/...")
    arguments = parser.parse_args(words)
    if arguments.rounds is None:
        arguments.rounds = 3 if arguments.quick else 45
    for name in ("processes", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"expected --{name} to be at least 1, got {getattr(arguments, name)}")
    return arguments


def run_set(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one parameter set, in one group of processes."""
    program = Path(__file__).resolve().with_name("sharded_process.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        words = [sys.executable, str(program), name, str(arguments.rounds), str(arguments.seed)]
        launch.run([*words, str(out)], processes=arguments.processes, threads=1, alone_too=True)
        figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return case_of(name, figures, judged=not arguments.quick)


def case_of(name: str, figures: Mapping[str, Any], judged: bool) -> dict[str, Any]:
    """A row of the result from the figures of the processes."""
    samples: dict[str, list[float]] = figures["samples"]
    summary = summarize(samples, SUBJECT)
    return {
        "name": name,
        "subject": SUBJECT,
        "seconds": {contender: entry["seconds"] for contender, entry in summary.items()},
        "ratios": {
            peer: {
                "of_medians": summary[peer]["ratio_of_medians"],
                "per_round": summary[peer]["ratio"],
            }
            for peer in PEERS
        },
        "of_parts": 1.0 / summary[PARTS]["ratio"]["median"],
        "targets": {"parts": PARTS_TARGET, "peers": PEER_TARGET} if judged else None,
        "state_bytes": figures["state_bytes"],
        "grad_bytes": figures["grad_bytes"],
        "verified": figures["verified"],
        "samples": samples,
    }


def lines(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Times, ratios, and the bytes of states and gradients on each rank."""
    head = ("set", "contender", "ms (± half IQR)", "its time / ours")
    sizes = ("bytes of states by rank", "bytes of gradients by rank")
    found = [row(*head, *sizes), row("---", "---", *["---:"] * 4)]
    for case in cases:
        for name, seconds in case["seconds"].items():
            compared = name in case["ratios"]
            found.append(
                row(
                    case["name"],
                    name,
                    f"{1e3 * seconds['median']:.2f} ± {1e3 * seconds['iqr'] / 2:.2f}",
                    f"{result_file.ratio(case, name):.2f}x" if compared else "",
                    *(
                        ", ".join(f"{count:,}" for count in case[key].get(name, []))
                        for key in ("state_bytes", "grad_bytes")
                    ),
                )
            )
        found.append(
            row(
                case["name"],
                f"{SUBJECT} / {PARTS}",
                f"{case['of_parts']:.3f}x",
                *[""] * 3,
            )
        )
    return found


def missed(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each target that is missed."""
    found = []
    for case in cases:
        targets = case["targets"]
        if targets is None:
            continue
        if not case["of_parts"] <= targets["parts"]:
            found.append(
                f"{case['name']}: expected at most {targets['parts']:g} times the parts, got "
                f"{case['of_parts']:.3f}"
            )
        found += [
            f"{case['name']}: expected {peer} to take at least {targets['peers']:g} times our "
            f"time, got {result_file.ratio(case, peer):.3f}"
            for peer in (ZERO, FSDP)
            if not result_file.ratio(case, peer) >= targets["peers"]
        ]
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measures, writes the result file and prints the table; returns 1 if a target is missed."""
    arguments = parse_arguments(words)
    out = result_file.prepare(arguments.out, "sharded")
    torch.set_num_threads(1)
    described = environment.describe(
        "benchmarks/sharded.py", device="cpu", seed=arguments.seed, rounds=arguments.rounds
    ) | {"processes": arguments.processes, "processors": os.cpu_count()}
    cases = [run_set(name, arguments) for name in ([arguments.only] if arguments.only else SETS)]
    result = {
        "format": RESULT_FORMAT,
        "suite": "sharded",
        "environment": described,
        "cases": cases,
    }
    result_file.write(out, result)
    print("\n".join([*lines(cases), "", *missed(cases)]))
    print(f"wrote {out}")
    return 1 if missed(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
