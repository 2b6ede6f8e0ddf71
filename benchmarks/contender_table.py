# SPDX-License-Identifier: BSD-3-Clause
"""The table of what is known of each contender beside its ratio: bytes, share, host, dispatches."""

from __future__ import annotations

from typing import Any

HEAD = (
    "case",
    "contender",
    "model bytes per element",
    "of its passes",
    "ms",
    "GB/s of model bytes",
    "share of the ceiling",
    "host µs",
    "dispatched",
)


def row(*cells: str) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def reference(case: dict[str, Any]) -> str:
    """The stream that bandwidths are compared with; older files do not name it."""
    return str(case.get("reference", "in-place scale"))


def streams(case: dict[str, Any]) -> list[str]:
    """The streams that were timed in the same rounds; older files have one."""
    return list(case.get("ceilings", [reference(case)]))


def share(case: dict[str, Any], contender: str) -> str:
    """A contender's model bytes per second, of the faster stream's."""
    ceiling = max(case["gb_per_s"][stream] for stream in streams(case))
    return f"{case['gb_per_s'][contender] / ceiling:.0%}"


def lines(cases: list[dict[str, Any]]) -> list[str]:
    """A row for each contender of each case. What is not known stays empty."""
    found = [row(*HEAD), row("---", "---", *["---:"] * 7)]
    for case in cases:
        for name, passes in case["pass_bytes"].items():
            host = case["host_part_seconds"].get(name)
            found.append(
                row(
                    case["name"],
                    name,
                    f"{case['bytes_per_element']:g}",
                    "" if passes is None else f"{passes:g}",
                    f"{1e3 * case['seconds'][name]['median']:.3f}",
                    f"{case['gb_per_s'][name]:.1f}",
                    share(case, name),
                    "" if host is None else f"{1e6 * host:,.0f}",
                    f"{case['dispatched'][name]:,}",
                )
            )
    return found
