# SPDX-License-Identifier: BSD-3-Clause
"""Counts the bytes that a step reads from memory and writes to it, in a simulated cache.

Valgrind's callgrind simulates a last-level cache that holds a fraction of the parameter set, and
writes back what was changed. What misses it is the step's traffic: lines of 64 bytes that are read,
and changed lines that are driven out. Valgrind shows no AVX-512, so the code for AVX2 is counted.
Hardware counters would need perf_event_open, which virtual machines rarely allow.

Example:
    python benchmarks/traffic.py
    python benchmarks/traffic.py --only fp32/s3 --out traffic.json
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import callgrind
import environment
import result_file
import torchfuse
from contender_table import row
from suites.contenders import FUSED, OURS
from suites.parameters import ParameterSet
from suites.pipelines import Memory
from suites.scenarios import BOTH, CASES, Case, Peer

LINE = 64
#: The set has one tensor of so many elements, and the cache so many bytes: an eighth of what an
#: fp32 step touches.
NUMEL, CACHE = 2**22, 8 * 2**20
#: Changed lines of the step before are driven out within the counted one, and so on.
WARM_UP_STEPS = 2


class Traffic(NamedTuple):
    """Bytes."""

    read: int
    written: int

    @classmethod
    def of(cls, dump: str) -> Traffic:
        """What a dump of callgrind says; lines that are written are read before.

        Raises:
            RuntimeError: the dump has no counts of a cache that writes back.
        """
        events = re.search(r"^events: (.*)$", dump, re.MULTILINE)
        totals = re.search(r"^(?:totals|summary): (.*)$", dump, re.MULTILINE)
        names = events[1].split() if events else []
        if totals is None or "DLdmw" not in names:
            raise RuntimeError(f"traffic: expected counts of a cache in the dump, got {names}")
        # Trailing zeros are left out.
        counts = dict.fromkeys(names, 0) | dict(
            zip(names, map(int, totals[1].split()), strict=False)
        )
        return cls(
            LINE * (counts["DLmr"] + counts["DLmw"]),
            LINE * (counts["DLdmr"] + counts["DLdmw"]),
        )


#: Structures with masters work on blocks that do not fit in the simulated cache.
COUNTED = (OURS, FUSED, BOTH)


def selected(only: str) -> list[tuple[Case, Peer]]:
    """A contender of a scenario each; the shapes come from `parameters()`, not from the case."""
    return [
        (case, peer)
        for case in CASES
        for peer in case.contenders
        if case.parameters == "resnet50" and only in name_of(case) and peer.name in COUNTED
    ]


def name_of(case: Case) -> str:
    """Precision and scenario."""
    return case.name.rpartition("/")[0]


def parameters(numel: int) -> ParameterSet:
    """One tensor."""
    return ParameterSet("one tensor", ((numel,),), offset=0, moments={}, zero_grads=False)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="scenarios with this in their name: fp32/s3")
    parser.add_argument("--numel", type=int, default=NUMEL, help="elements of the one tensor")
    parser.add_argument("--cache", type=int, default=CACHE, help="bytes of the last-level cache")
    parser.add_argument("--out", type=Path, help="result file; default: build/benchmarks/...")
    parser.add_argument("--under-valgrind", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.numel < 1:
        parser.error(f"expected --numel to be at least 1, got {options.numel}")
    return options


def run_under_valgrind(options: argparse.Namespace) -> None:
    """Runs in valgrind: one dump of the counters per contender."""
    isa = torchfuse._C.cpu_isa()
    if isa != "avx2":
        raise RuntimeError(
            f"traffic: expected avx2 under valgrind, got {isa}. Count on a processor with AVX2."
        )
    torch.set_num_threads(1)
    for case, peer in selected(options.only):
        print(f"{name_of(case)}, {peer.name} ...", file=sys.stderr, flush=True)
        memory = Memory.of(parameters(options.numel), case.masters, torch.device("cpu"))
        for param, grad, master in zip(memory.params, memory.grads, memory.masters, strict=True):
            grad.fill_(0.5)
            master.fill_(0.1)
            param.copy_(master)
        for moment in (*memory.means, *memory.squares):
            moment.zero_()
        pipeline = peer.make(memory, case.scenario, 1.0)
        for _ in range(WARM_UP_STEPS):
            pipeline.step()
        with callgrind.counting():
            pipeline.step()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes per element of each contender, by scenario."""
    command = [sys.executable, str(Path(__file__).resolve()), "--under-valgrind"]
    command += ["--only", options.only, "--numel", str(options.numel)]
    caches = ["--cache-sim=yes", "--simulate-wb=yes", "--I1=32768,8,64", "--D1=32768,8,64"]
    caches.append(f"--LL={options.cache},16,{LINE}")
    chosen = selected(options.only)
    with tempfile.TemporaryDirectory() as folder:
        found = callgrind.dumps(command, Path(folder), len(chosen), caches)
    cases: dict[str, dict[str, Any]] = {}
    for (case, peer), dump in zip(chosen, found, strict=True):
        traffic = Traffic.of(dump)
        entry = cases.setdefault(
            name_of(case),
            {"name": name_of(case), "model_bytes": case.bytes_per_element, "traffic": {}},
        )
        entry["traffic"][peer.name] = {
            "read": traffic.read / options.numel,
            "written": traffic.written / options.numel,
            "passes": peer.bytes[case.scenario.name],
        }
    return list(cases.values())


def lines(cases: Sequence[dict[str, Any]]) -> list[str]:
    """The table."""
    head = ("bytes per element", "contender", "read", "written", "both", "of its passes", "model")
    found = [row(*head), row("---", "---", *["---:"] * 5)]
    for case in cases:
        for name, traffic in case["traffic"].items():
            both = traffic["read"] + traffic["written"]
            numbers = [f"{value:.1f}" for value in (traffic["read"], traffic["written"], both)]
            numbers += [f"{traffic['passes']:g}", f"{case['model_bytes']:g}"]
            found.append(row(case["name"], name, *numbers))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts, writes the result file and prints the table."""
    options = parse_arguments(arguments)
    if options.under_valgrind:
        run_under_valgrind(options)
        return 0
    if callgrind.valgrind() is None:
        print("traffic: expected valgrind on the PATH, got none. Install it.", file=sys.stderr)
        return 2
    if not selected(options.only):
        known = " ".join(dict.fromkeys(name_of(case) for case in CASES))
        print(f"traffic: expected --only to name one of {known}, got {options.only!r}")
        return 2
    out = result_file.prepare(options.out, "traffic-cpu")
    described = environment.describe("benchmarks/traffic.py", device="cpu", seed=0, rounds=1) | {
        "cpu_isa": "avx2",
        "threads": 1,
    }
    result = {
        "format": 1,
        "environment": described,
        "numel": options.numel,
        "cache": options.cache,
        "cases": measure(options),
    }
    result_file.write(out, result)
    print("\n".join(lines(result["cases"])))
    print(f"\nwrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
