# SPDX-License-Identifier: BSD-3-Clause
"""Prints benchmark results as Markdown.

Example:
    python benchmarks/compare.py result.json            one run
    python benchmarks/compare.py old.json new.json      what changed between two runs

Both runs must come from the same machine, the same torch version and clean git trees. --across
lifts this restriction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import result_file

# On a busy machine, two runs of the same code differ by up to this much, relative to the stream.
BETWEEN_RUNS = 0.05
# Context entries that must be equal in both runs. Old files lack some entries.
SAME = {
    "cpu": "processor",
    "gpu": "GPU",
    "cpu_isa": "instruction set",
    "threads": "number of threads",
    "torch": "version of torch",
    "openmp_wait_policy": "OMP_WAIT_POLICY",
    "torch_cpu_capability": "ATEN_CPU_CAPABILITY",
}
PARTS = ("suite", "context", "benchmarks")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _milliseconds(seconds: dict[str, float]) -> str:
    return f"{1e3 * seconds['median']:.3f} ± {1e3 * (seconds['q3'] - seconds['q1']) / 2:.3f}"


def gb_per_s(row: dict[str, Any]) -> float:
    """Returns the subject's GB/s, counting the minimum bytes that the case must move."""
    return float(row["bytes"] / row["seconds"][row["subject"]]["median"] / 1e9)


def share(row: dict[str, Any]) -> float:
    """Returns the subject's GB/s divided by the fastest stream's GB/s in the same rounds."""
    return gb_per_s(row) / float(max(row["streams"].values()))


def table(result: dict[str, Any]) -> str:
    """Returns a table for one run, with a line for each benchmark and peer."""
    context = result["context"]
    lines = [
        f"{result['suite']}: {context['gpu'] or context['cpu']}, {context['threads']} threads, "
        f"{context['cpu_isa']}, torch {context['torch']}, {context['date']}",
        "",
        _row(
            *("case", "tensors", "ms (± half IQR)", "GB/s", "of the faster stream", "peer"),
            *("its ms", "ratio (quartiles per round)"),
        ),
        _row("---", *["---:"] * 4, "---", *["---:"] * 2),
    ]
    for row in result["benchmarks"]:
        speed = [f"{gb_per_s(row):.1f}", f"{share(row):.0%}"] if row.get("streams") else ["", ""]
        for peer, ratio in row["ratios"].items():
            # end_to_end.py names parts of an iteration `torchfuse, step` and `torch fused, step`.
            subject = row["subject"]
            if subject not in row["seconds"]:
                subject = f"{subject}, {peer.rpartition(', ')[2]}"
            lines.append(
                _row(
                    row["name"],
                    f"{row['tensors']:,}",
                    _milliseconds(row["seconds"][subject]),
                    *speed,
                    peer,
                    _milliseconds(row["seconds"][peer]),
                    f"{ratio['median']:.2f}x ({ratio['q1']:.2f} to {ratio['q3']:.2f})",
                )
            )
    for key in ("missing", "skipped"):
        reasons = result.get(key, {})
        lines += [""] * bool(reasons) + [f"{key}: {name} ({why})" for name, why in reasons.items()]
    return "\n".join(lines)


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Returns a table that compares the subject's speed, relative to a stream, in two runs."""
    before = {row["name"]: row for row in old["benchmarks"]}
    after = [row["name"] for row in new["benchmarks"]]
    lines = [
        _row("case", "old ms", "new ms", "speed, relative to the reference", "verdict"),
        _row("---", *["---:"] * 3, "---"),
    ]
    on_gpu = new["context"]["gpu"] is not None

    def relative(row: dict[str, Any]) -> float:
        return gb_per_s(row) / float(row["streams"]["copy" if on_gpu else "in-place scale"])

    for row in new["benchmarks"]:
        former = before.get(row["name"])
        if former is None:
            continue
        change = relative(row) / relative(former)
        verdict = "faster" if change > 1 else "slower"
        if abs(change - 1) <= BETWEEN_RUNS:
            verdict = "same"
        times = (_milliseconds(r["seconds"][r["subject"]]) for r in (former, row))
        lines.append(_row(row["name"], *times, f"{change:.2f}x", verdict))
    alone = {
        "old": [name for name in before if name not in after],
        "new": [name for name in after if name not in before],
    }
    found = [f"only in the {run} run: {', '.join(names)}" for run, names in alone.items() if names]
    return "\n".join([*lines, "", *found] if found else lines)


def refusals(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the reasons why two runs should not be compared, a sentence each."""
    runs = {"old": old["context"], "new": new["context"]}
    found = [
        f"Expected two runs with the same {words}, got {runs['old'][key]} and {runs['new'][key]}."
        for key, words in SAME.items()
        if all(key in run for run in runs.values()) and runs["old"][key] != runs["new"][key]
    ]
    for name, context in runs.items():
        dirty = context["git"]["dirty"]
        if dirty is not False:
            got = "one with uncommitted changes" if dirty else "none"
            found.append(f"Expected the {name} run to have a clean git tree, got {got}.")
    return found


def incomparable(paths: Sequence[Path], results: Sequence[dict[str, Any]]) -> str | None:
    """Returns why the results cannot be printed, or None."""
    for path, result in zip(paths, results, strict=True):
        missing = [part for part in PARTS if part not in result]
        if missing:
            parts = " and no ".join(missing)
            return f"Expected a result file of benchmarks/run.py, got {path}, which has no {parts}."
    if len({result["suite"] for result in results}) > 1:
        suites = " and ".join(result["suite"] for result in results)
        return f"Expected two runs of one suite, got {suites}: cases of one name differ."
    names = [{row["name"] for row in result["benchmarks"]} for result in results]
    if not set.intersection(*names):
        return "Expected a case that all runs have, got none."
    return None


def compared(paths: Sequence[Path], results: list[dict[str, Any]], across: bool) -> int:
    """Prints the results; returns 2 if the results cannot be compared."""
    reason = incomparable(paths, results)
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    if len(results) == 1:
        print(table(results[0]))
        return 0
    reasons, changes = refusals(*results), difference(*results)
    if reasons and not across:
        print(*reasons, "Pass --across to compare them.", sep="\n", file=sys.stderr)
        return 2
    if reasons:
        print("Across different runs:", *(f"- {reason}" for reason in reasons), "", sep="\n")
    print(changes)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Prints one result, or the difference between two results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="one result file, or old and new")
    parser.add_argument(
        "--across",
        action="store_true",
        help="compare runs of other machines, versions or changed trees all the same",
    )
    arguments = parser.parse_args(words)
    if len(arguments.results) > 2:
        parser.error(f"expected one or two result files, got {len(arguments.results)}")
    try:
        results = [result_file.read(path) for path in arguments.results]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return compared(arguments.results, results, arguments.across)
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        got = f"{' or '.join(map(str, arguments.results))}: {type(error).__name__}: {error}"
        print(f"Expected results of benchmarks/run.py, got another in {got}.", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
