# SPDX-License-Identifier: BSD-3-Clause
"""Prints result files as Markdown.

Example:
    python benchmarks/compare.py result.json            one run, with targets and verdicts
    python benchmarks/compare.py old.json new.json      what changed between two runs

Two runs have to be of one machine, of one torch and of commits; with --across they need not be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import contender_table
import result_file
import thread_gain
from comparable import incomparable, refusals
from contender_table import reference as _reference
from contender_table import row as _row

# Two runs of the same code differ by up to this much on a busy machine, reference stream aside.
BETWEEN_RUNS = 0.05


def _milliseconds(quartiles: dict[str, float]) -> str:
    return f"{1e3 * quartiles['median']:.3f} ± {1e3 * quartiles['iqr'] / 2:.3f}"


def _verdict(reached: bool | None) -> str:
    return "" if reached is None else "met" if reached else "**missed**"


def met(row: dict[str, Any]) -> bool | None:
    """Whether a case reaches its target; None without one."""
    target = row["target"]
    if target is None:
        return None
    return bool(result_file.ratio(row, target["peer"]) >= target["ratio"])


def memory_met(row: dict[str, Any]) -> bool | None:
    """Whether the extra memory of first and later steps stays below its target."""
    if row["target_mib"] is None:
        return None
    largest = max(row["first_step_beyond_states_mib"], row["later_step_mib"])
    return bool(largest < row["target_mib"])


def _case_lines(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        _row(
            "case",
            "tensors",
            "ms (± half IQR)",
            "GB/s",
            "streams: GB/s",
            "share of the faster",
            "peer",
            "its ms",
            "ratio (quartiles per round)",
            "target",
            "verdict",
        ),
        _row("---", *["---:"] * 5, "---", *["---:"] * 3, "---"),
    ]
    for row in cases:
        rates = [f"{name} {row['gb_per_s'][name]:.1f}" for name in contender_table.streams(row)]
        for peer, ratio in row["ratios"].items():
            target = row["target"]
            is_target = target is not None and target["peer"] == peer
            rounds = ratio["per_round"]
            lines.append(
                _row(
                    row["name"],
                    f"{row['tensors']:,}",
                    _milliseconds(row["seconds"][row["subject"]]),
                    f"{row['gb_per_s'][row['subject']]:.1f}",
                    ", ".join(rates),
                    contender_table.share(row, row["subject"]),
                    peer,
                    _milliseconds(row["seconds"][peer]),
                    f"{rounds['median']:.2f}x ({rounds['low']:.2f} to {rounds['high']:.2f})",
                    f"≥ {target['ratio']:g}x" if is_target else "",
                    _verdict(met(row)) if is_target else "",
                )
            )
    return lines


def _host_lines(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        _row("host, per call", "ms (± half IQR)", "peer", "its ms", "ratio", "waits for the GPU"),
        _row("---", "---:", "---", "---:", "---:", "---"),
    ]
    for row in cases:
        host = row["host"]
        for peer, ratio in host["ratios"].items():
            lines.append(
                _row(
                    row["name"],
                    _milliseconds(host["seconds"][row["subject"]]),
                    peer,
                    _milliseconds(host["seconds"][peer]),
                    f"{ratio:.2f}x",
                    ", ".join(host["waits"]),
                )
            )
    return lines


def _other_lines(cases: list[dict[str, Any]]) -> list[str]:
    """Contenders with other bytes or another result: a ratio of times would compare nothing."""
    lines = [
        _row("no peer", "case", "ms (± half IQR)", "bytes per element", "error against ours"),
        _row("---", "---", *["---:"] * 3),
    ]
    for row in cases:
        for name, other in row["others"].items():
            lines.append(
                _row(
                    name,
                    row["name"],
                    _milliseconds(row["seconds"][name]),
                    f"{other['bytes_per_element']:.1f}",
                    f"{other['error']:.1e}",
                )
            )
    return lines


def _memory_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        _row(
            "peak extra memory",
            "contender",
            "first step beyond states, MiB",
            "later steps, MiB",
            "target",
            "verdict",
        ),
        _row("---", "---", *["---:"] * 3, "---"),
    ]
    lines += [
        _row(
            row["name"],
            row["contender"],
            f"{row['first_step_beyond_states_mib']:.2f}",
            f"{row['later_step_mib']:.2f}",
            "" if row["target_mib"] is None else f"< {row['target_mib']:g}",
            _verdict(memory_met(row)),
        )
        for row in rows
    ]
    return lines


def host_path_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A table of `host_path.measure()`'s rows. Results of before had no allocations."""
    lines = [
        _row("host path", "tensors", "instructions per step", "per tensor", "allocations per step"),
        _row("---", "---:", "---:", "---:", "---:"),
    ]
    lines += [
        _row(
            row["contender"],
            f"{row['tensors']:,}",
            f"{row['instructions_per_step']:,.0f}",
            f"{row['instructions_per_step'] / row['tensors']:,.0f}",
            f"{row['allocations_per_step']:,.1f}" if "allocations_per_step" in row else "",
        )
        for row in rows
    ]
    return lines


def table(result: dict[str, Any]) -> str:
    """One run: times, bandwidths, ratios to the peers, and the verdict on each target."""
    environment = result["environment"]
    lines = [
        f"{result['suite']}: {environment['gpu'] or environment['cpu']}, "
        f"{environment['threads']} threads, {environment['cpu_isa']}, "
        f"torch {environment['torch']}, {environment['date']}"
    ]
    gain = thread_gain.sentence(result)
    if gain is not None:
        lines += ["", gain]
    on_gpu = [row for row in result["cases"] if row.get("host")]
    with_passes = [row for row in result["cases"] if row.get("pass_bytes")]
    with_others = [row for row in result["cases"] if row.get("others")]
    for key, render in (
        ("cases", _case_lines),
        ("peak_memory", _memory_lines),
        ("host_path", host_path_lines),
    ):
        if result[key]:
            lines += ["", *render(result[key])]
    if with_passes:
        lines += ["", *contender_table.lines(with_passes)]
    if with_others:
        lines += ["", *_other_lines(with_others)]
    if on_gpu:
        lines += ["", *_host_lines(on_gpu)]
    for key in ("missing", "skipped"):
        reasons = result.get(key, {})
        lines += [""] * bool(reasons) + [f"{key}: {name} ({why})" for name, why in reasons.items()]
    return "\n".join(lines)


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Two runs: the subject's time as a share of the in-run reference stream, old and new."""
    before = {row["name"]: row for row in old["cases"]}
    after = [row["name"] for row in new["cases"]]
    lines = [
        _row("case", "old ms", "new ms", "speed, relative to the reference", "verdict"),
        _row("---", *["---:"] * 3, "---"),
    ]
    for row in new["cases"]:
        former = before.get(row["name"])
        if former is None:
            continue

        def relative(entry: dict[str, Any]) -> float:
            return float(entry["gb_per_s"][entry["subject"]] / entry["gb_per_s"][_reference(entry)])

        change = relative(row) / relative(former)
        verdict = "faster" if change > 1 else "slower"
        if abs(change - 1) <= BETWEEN_RUNS:
            verdict = "same"
        lines.append(
            _row(
                row["name"],
                _milliseconds(former["seconds"][former["subject"]]),
                _milliseconds(row["seconds"][row["subject"]]),
                f"{change:.2f}x",
                verdict,
            )
        )
    alone = {
        "old": [name for name in before if name not in after],
        "new": [name for name in after if name not in before],
    }
    found = [f"only in the {run} run: {', '.join(names)}" for run, names in alone.items() if names]
    return "\n".join([*lines, "", *found] if found else lines)


def main() -> int:
    """Prints one result, or the difference of two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="one result file, or old and new")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument(
        "--across",
        action="store_true",
        help="compare runs of other machines, versions or changed trees all the same",
    )
    arguments = parser.parse_args()
    if len(arguments.results) > 2:
        parser.error(f"expected one or two result files, got {len(arguments.results)}")
    try:
        results = [result_file.read(path) for path in arguments.results]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return compared(results, arguments)
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        got = f"{' or '.join(map(str, arguments.results))}: {type(error).__name__}: {error}"
        print(f"Expected results of benchmarks/run.py, got another in {got}.", file=sys.stderr)
        return 2


def compared(results: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    """Prints what the results say; 2 if they are not to be compared."""
    reason = incomparable(arguments.results, results)
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    newest = results[-1]
    verdicts = [met(row) for row in newest["cases"]]
    verdicts += [memory_met(row) for row in newest["peak_memory"]]
    if len(results) == 1:
        print(table(newest))
    else:
        reasons, changes = refusals(*results), difference(*results)
        if reasons and not arguments.across:
            print(*reasons, "Pass --across to compare them.", sep="\n", file=sys.stderr)
            return 2
        if reasons:
            print("Across different runs:", *(f"- {reason}" for reason in reasons), "", sep="\n")
        print(changes)
    return 1 if arguments.check and False in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
