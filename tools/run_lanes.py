# SPDX-License-Identifier: BSD-3-Clause
"""Runs make targets in order, continues after failures, and prints each target's cost.

Processor seconds (user + system, over all child processes) are comparable between machines and
loads. Minutes are not.

    python tools/run_lanes.py "make test" test-cpp test-python
"""

import os
import subprocess
import sys
import time

name, *lanes = sys.argv[1:]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the cores are shared with other tests
lines, failed, total = [], [], time.monotonic()
for lane in lanes:
    print(f"--- {lane}", flush=True)
    start, cpu = time.monotonic(), sum(os.times()[2:4])
    if subprocess.run([os.environ.get("MAKE", "make"), "--no-print-directory", lane]).returncode:
        failed.append(lane)
    seconds, minutes = sum(os.times()[2:4]) - cpu, (time.monotonic() - start) / 60
    verdict = "failed" if lane in failed else "passed"
    lines.append(f"lane {lane:26} {seconds:6.0f} CPU-s {minutes:6.1f} min  {verdict}")
verdict = f"failed: {', '.join(failed)}" if failed else f"passed: all {len(lanes)} lanes"
lines.append(f"{name} {verdict}, {(time.monotonic() - total) / 60:.1f} min")
print(*lines, sep="\n", flush=True)
sys.exit(bool(failed))
