# SPDX-License-Identifier: BSD-3-Clause
"""Which result files of benchmarks/run.py can be compared, and why others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import thread_gain

# What two runs that are compared must have in common.
SAME = {
    "cpu": "processor",
    "gpu": "GPU",
    "cpu_isa": "instruction set",
    "threads": "number of threads",
    "torch": "version of torch",
    "openmp_wait_policy": "OMP_WAIT_POLICY",
    "torch_cpu_capability": "ATEN_CPU_CAPABILITY",
}
# What older files do not say.
LATER = ("openmp_wait_policy", "torch_cpu_capability")

# What each file of benchmarks/run.py has.
PARTS = ("suite", "environment", "cases", "peak_memory")
# Of which it has at least one, or says why it was skipped.
MEASURED = ("cases", "peak_memory", "host_path", "skipped")


def refusals(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Why two runs should not be compared, a sentence for each reason."""
    runs = {"old": old["environment"], "new": new["environment"]}
    said = {key for key in SAME if key not in LATER or all(key in run for run in runs.values())}
    found = [
        f"Expected two runs with the same {words}, got {runs['old'][key]} and {runs['new'][key]}."
        for key, words in SAME.items()
        if key in said and runs["old"][key] != runs["new"][key]
    ]
    for name, environment in runs.items():
        dirty = environment["git"]["dirty"]
        if dirty is not False:
            got = "one with uncommitted changes" if dirty else "none"
            found.append(f"Expected the {name} run to have a clean git tree, got {got}.")
    other_cores = thread_gain.refusal(old, new)
    return found if other_cores is None else [*found, other_cores]


def incomparable(paths: Sequence[Path], results: Sequence[dict[str, Any]]) -> str | None:
    """Why there is nothing to print, in a sentence."""
    for path, result in zip(paths, results, strict=True):
        missing = [part for part in PARTS if part not in result]
        if missing:
            parts = " and no ".join(missing)
            return f"Expected a result file of benchmarks/run.py, got {path}, which has no {parts}."
        if len(results) == 1 and not any(result.get(part) for part in MEASURED):
            return f"Expected a result file with a case, got {path}, which has none."
    if len({result["suite"] for result in results}) > 1:
        suites = " and ".join(result["suite"] for result in results)
        return f"Expected two runs of one suite, got {suites}: cases of one name differ."
    names = [{row["name"] for row in result["cases"]} for result in results]
    if len(results) > 1 and not set.intersection(*names):
        return "Expected runs with a case in common, got none."
    return None
