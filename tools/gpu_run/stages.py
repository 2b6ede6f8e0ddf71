# SPDX-License-Identifier: BSD-3-Clause
"""The stages of both calls, in the order of their worth.

A script runs in the repository's root. In $REPORT it leaves what it is judged by: reports of tests
as *.xml, figures as *.json. $WORK is a folder for what nobody reads, $BUNDLE is the bundle.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

KERNELS = "$BUNDLE/tests/cpp/kernels/cuda/torchfuse_cuda_kernel_tests"
#: The same tests, on the emulation that runs the kernels' source on the CPU.
EMULATED = "build/dev/tests/cpp/kernels/cuda/torchfuse_cuda_on_cpu_tests"
CLASSES = "$BUNDLE/tests/cpp/torchfuse_api_tests"
XML = "--gtest_output=xml:$REPORT"
SMALL = "--gtest_filter='*Sanitizer*:*Small*'"
#: The first to run: where arguments lie above 32 KB, and where blocks hand over.
FIRST = "--gtest_filter='CudaFusedUpdateAddresses*:CudaLastBlock*'"
PYTEST = (
    "$PYTHON -m pytest -q -o cache_dir=$WORK/pytest -o faulthandler_timeout=60 --maxfail 200 "
    "--junitxml=$REPORT/pytest.xml"
)
FAST = "-m 'cuda and not slow and not processes' -k 'not compile'"
EACH_OP = "tests/python/cuda/test_every_op.py"
#: What a tool must say of a fault in a kernel of the test program.
PLANTED = {
    "memcheck": ("out_of_bounds", "Invalid __global__ read of size 4"),
    "racecheck": ("missing_barrier", "RACECHECK SUMMARY: [1-9]"),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A program that is timed and judged.

    `rehearsal` is what the pretended device can show of it; None: nothing.
    """

    name: str
    seconds: float
    script: str
    rehearsal: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


#: Parts of a stage run beside each other.
Stage = tuple[Part, ...]


def _in_shards(program: str, shards: int, before: str) -> str:
    return f"""
status=0
{before} || status=1
for shard in $(seq 0 {shards - 1}); do
  GTEST_TOTAL_SHARDS={shards} GTEST_SHARD_INDEX=$shard {program} {XML}/$shard.xml &
done
for job in $(jobs -p); do wait "$job" || status=1; done
exit $status"""


def _sanitizer(tool: str) -> Part:
    # Behind each allocation, so that it has no neighbor that an access could fall into.
    padding = " --padding 512" * (tool == "memcheck")
    program = f"compute-sanitizer --tool {tool}{padding} --error-exitcode 99 {KERNELS}"
    # Neither margins nor fresh contents of ours, which would hide what the tools look for.
    exact = {"TORCHFUSE_EXACT_ALLOCATIONS": "1"}
    return Part(tool, 110, f"{program} {SMALL} {XML}/tests.xml", environment=exact)


def _planted(tool: str) -> Part:
    fault, words = PLANTED[tool]
    script = f"""
compute-sanitizer --tool {tool} {KERNELS} --gtest_filter='CudaBlockSum*' > $WORK/{tool} 2>&1 || true
cat $WORK/{tool}
grep -qE '{words}' $WORK/{tool}
echo '{{"{fault}": "found"}}' > $REPORT/found.json"""
    variables = {"TORCHFUSE_EXACT_ALLOCATIONS": "1", "TORCHFUSE_PLANTED_FAULT": fault}
    return Part(f"{tool} of a planted fault", 60, script, environment=variables)


_OPS = f"{PYTEST} {EACH_OP} -m cuda -k as_on_the_cpu"
_LOAD = f"""
nvidia-smi
status=0
{KERNELS} --gtest_filter='CudaRounding*' {XML}/rounding.xml || status=1
{_OPS} || status=1
exit $status"""
_AGAIN = f"""
export status=0
if [ -n "$FAILED_KERNEL_TESTS" ]; then
  export CUDA_LAUNCH_BLOCKING=1
  {KERNELS} --gtest_filter="$FAILED_KERNEL_TESTS" {XML}/kernels.xml || status=1
elif [ -s $WORK/pytest/v/cache/lastfailed ]; then
  CUDA_LAUNCH_BLOCKING=1 {PYTEST} tests/python --last-failed || status=1
else
  {CLASSES} {XML}/classes.xml --gtest_filter='*WorldOfOne*:GradScaler*:AutocastGuard*' || status=1
fi
exit $status"""
_NCU = """
metrics=$(sed -n 's/^    "\\([a-z]*__.*\\)":.*/\\1/p' benchmarks/gpu_kernels.py | paste -sd ,)
sections=$(printf -- '--section %s ' SpeedOfLight WarpStateStats Occupancy \\
  MemoryWorkloadAnalysis InstructionStats)
ncu --clock-control none --profile-from-start off $sections --metrics "$metrics" \\
  --kernel-name 'regex:fused_update|l2_norm|batch_norm_stats|softmax_cross|column_sums' \\
  --export $OUT/kernels --force-overwrite $PYTHON benchmarks/gpu_kernels.py
ncu --import $OUT/kernels.ncu-rep --csv --page raw > $WORK/kernels.csv
$PYTHON benchmarks/gpu_kernels.py --read $WORK/kernels.csv > $REPORT/kernels.json"""
_KERNELS_RUN = (
    "$PYTHON benchmarks/gpu_kernels.py --small && echo '{\"ran\": true}' > $REPORT/ran.json"
)
_TRAINING = """
$PYTHON benchmarks/gpu_training.py --out $REPORT/training.json
$BUNDLE/train_digits $BUNDLE/digits --epochs 3 --device cuda"""
_SMALL_TRAINING = "$PYTHON benchmarks/gpu_training.py --out $REPORT/training.json --small"
_ROWS = "$PYTHON benchmarks/gpu_rows.py --out $REPORT/rows.json"
_QUICK_ROWS = f"{_ROWS} --quick --rounds 1"
_LARGE = (
    f"{PYTEST} -n 4 tests/python/cuda/test_large.py {EACH_OP} -m 'cuda and (slow or processes)'"
)
_CAPTURES = f"{PYTEST} -n 2 {EACH_OP} -m 'cuda and processes'"
_FIRST = f"{KERNELS} {FIRST} {XML}/first.xml"
_OFTEN = {"TORCHFUSE_REPETITIONS": "10000"}
_PYTHON = f"{PYTEST} -n 8 --dist worksteal {FAST} tests/python"
_LESS_PYTHON = f"{PYTEST} -n 2 {FAST} tests/python/cuda tests/python/amp tests/python/ops"
_COMPILED = f"{PYTEST} -n 6 -m 'cuda and not slow' -k compile tests/python"

CALL_A: tuple[Stage, ...] = (
    (Part("load", 20, _LOAD, _OPS),),
    (
        Part(
            "kernels, CPU = CUDA",
            55,
            _in_shards(KERNELS, 8, _FIRST),
            _in_shards(f"{EMULATED} {SMALL}", 2, "true"),
            _OFTEN,
        ),
    ),
    (
        Part("Python tests on CUDA", 120, _PYTHON, _LESS_PYTHON),
        *map(_sanitizer, ("memcheck", "initcheck", "racecheck", "synccheck")),
        *map(_planted, PLANTED),
    ),
    (Part("failures again, or C++ classes", 30, _AGAIN, _AGAIN),),
    (Part("benchmarks", 130, _ROWS, _QUICK_ROWS),),
    (Part("ncu", 45, _NCU, _KERNELS_RUN),),
    (Part("training", 60, _TRAINING, _SMALL_TRAINING),),
    (Part("large tensors, first ops in captures", 20, _LARGE, _CAPTURES),),
    (Part("compiled", 60, _COMPILED),),
)


def call_b() -> tuple[Stage, ...]:
    """What the environment names."""
    kernels = f'--gtest_filter="$KERNELS" {XML}/kernels.xml'
    rows = 'export PYTHONPATH={0}/site:$PYTHONPATH\n{1} --only "$ROWS"'
    named = {
        "KERNELS": Part("kernels", 25, f"{KERNELS} {kernels}", f"{EMULATED} {kernels}"),
        "TESTS": Part("tests", 30, f"eval {PYTEST} -n 8 $TESTS", f"eval {PYTEST} $TESTS"),
        "BEFORE": Part("rows, before", 20, rows.format("$BEFORE", _ROWS)),
        "ROWS": Part("rows", 20, rows.format("$BUNDLE", _ROWS), f'{_QUICK_ROWS} --only "$ROWS"'),
    }
    return (
        (Part("load", 10, _LOAD, _OPS),),
        *((p,) for n, p in named.items() if os.environ.get(n)),
    )
