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
EMULATED = "build/dev-cuda/tests/cpp/kernels/cuda/torchfuse_cuda_on_cpu_tests"
CLASSES = "$BUNDLE/tests/cpp/torchfuse_api_tests"
XML = "--gtest_output=xml:$REPORT"
SMALL = "--gtest_filter='*Sanitizer*:*Small*'"
STRESS = "CudaStress*"
#: The first to run: where arguments lie above 32 KB, and where blocks hand over.
FIRST = "--gtest_filter='CudaFusedUpdateAddresses*:CudaLastBlock*'"
PYTEST = (
    "$PYTHON -m pytest -q -o cache_dir=$WORK/pytest -o faulthandler_timeout=60 --maxfail 200 "
    "--junitxml=$REPORT/pytest.xml $TEST_TIMEOUT"
)
FAST = "-m 'cuda and not slow and not processes' -k 'not compile'"
EACH_OP = "tests/python/cuda/test_every_op.py"
#: Neither margins nor fresh contents of ours, which would hide what the tools look for.
EXACT = {"TORCHFUSE_EXACT_ALLOCATIONS": "1"}
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


#: GoogleTest's line ahead of a test, as a report of its failure.
_RUNNING = (
    r"s|^\[ RUN  *\] \([^.]*\)\.\(.*\)"
    r'|<s><testcase classname="\1" name="\2"><failure/></testcase></s>|p'
)


def _in_shards(program: str, shards: int, before: str) -> str:
    """A shard that ends without a report says the test that it was in."""
    return f"""
status=0
{before} || status=1
for shard in $(seq 0 {shards - 1}); do
  GTEST_TOTAL_SHARDS={shards} GTEST_SHARD_INDEX=$shard {program} {XML}/$shard.xml \\
    > $REPORT/$shard.log 2>&1 &
done
for job in $(jobs -p); do wait "$job" || status=1; done
for shard in $(seq 0 {shards - 1}); do
  cat $REPORT/$shard.log
  [ -e $REPORT/$shard.xml ] \\
    || sed -n '{_RUNNING}' $REPORT/$shard.log | tail -n 1 > $REPORT/$shard.xml
done
exit $status"""


def _compute_sanitizer(tool: str) -> str:
    options = {
        # Behind each allocation, so that it has no neighbor that an access could fall into.
        "memcheck": " --padding 512",
        # Tests download whole tensors, also what a kernel has rightly not written.
        "initcheck": " --check-api-memory-access no",
    }
    return f"compute-sanitizer --tool {tool}{options.get(tool, '')}"


def _sanitizer(tool: str) -> Part:
    program = f"{_compute_sanitizer(tool)} --error-exitcode 99 {KERNELS}"
    return Part(tool, 110, f"{program} {SMALL} {XML}/tests.xml", environment=EXACT)


def _planted(tool: str) -> Part:
    fault, words = PLANTED[tool]
    script = f"""
{_compute_sanitizer(tool)} {KERNELS} --gtest_filter='CudaBlockSum*' > $REPORT/output 2>&1 || true
cat $REPORT/output
grep -qE '{words}' $REPORT/output
echo '{{"{fault}": "found"}}' > $REPORT/found.json"""
    variables = {**EXACT, "TORCHFUSE_PLANTED_FAULT": fault}
    return Part(f"{tool} of a planted fault", 60, script, environment=variables)


_OPS = f"{PYTEST} {EACH_OP} -m cuda -k as_on_the_cpu"
_LOAD = f"""
nvidia-smi || true
status=0
{KERNELS} --gtest_filter='CudaRounding*' {XML}/rounding.xml || status=1
{_OPS} || status=1
exit $status"""
_AGAIN = f"""
export status=0
if [ -n "$FAILED_KERNEL_TESTS" ]; then
  export CUDA_LAUNCH_BLOCKING=1
  {KERNELS} --gtest_filter="$FAILED_KERNEL_TESTS" {XML}/kernels.xml || status=1
fi
if [ -s $WORK/pytest/v/cache/lastfailed ]; then
  CUDA_LAUNCH_BLOCKING=1 {PYTEST} -n 2 tests/python --last-failed || status=1
elif [ -z "$FAILED_KERNEL_TESTS" ]; then
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
ncu --import $OUT/kernels.ncu-rep --csv --print-units base --page raw > $WORK/ncu-raw.log
$PYTHON benchmarks/gpu_kernels.py --read $WORK/ncu-raw.log > $REPORT/kernels.json"""
_KERNELS_RUN = (
    "$PYTHON benchmarks/gpu_kernels.py --small && echo '{\"ran\": true}' > $REPORT/ran.json"
)
_TRAINING = """
status=0
$PYTHON benchmarks/gpu_training.py --out $REPORT/training.json || status=1
$BUNDLE/train_digits $BUNDLE/digits --device cuda || status=1
exit $status"""
_SMALL_TRAINING = "$PYTHON benchmarks/gpu_training.py --out $REPORT/training.json --small"
_ROWS = "$PYTHON benchmarks/gpu_rows.py --out $REPORT/rows.json"
_QUICK_ROWS = f"{_ROWS} --quick --rounds 1"
_LARGE = (
    f"{PYTEST} -n 8 tests/python/cuda/test_large.py {EACH_OP} -m 'cuda and (slow or processes)'"
)
_CAPTURES = f"{PYTEST} -n 2 {EACH_OP} -m 'cuda and processes'"
_FIRST = f"{KERNELS} {FIRST} {XML}/first.xml"
_SHARDS = _in_shards(f"{KERNELS} --gtest_filter='-{STRESS}'", 8, _FIRST)
_EMULATED_SHARDS = _in_shards(f"{EMULATED} {SMALL}", 2, "true")
_STRESS = f"TORCHFUSE_REPETITIONS=10000 {KERNELS} --gtest_filter='{STRESS}' {XML}/tests.xml"
_EMULATED_STRESS = f"{EMULATED} --gtest_filter='{STRESS}' {XML}/tests.xml"
_PYTHON = f"{PYTEST} -n 8 --dist worksteal {FAST} tests/python"
_LESS_PYTHON = f"{PYTEST} -n 2 {FAST} tests/python/cuda tests/python/amp tests/python/ops"
_COMPILED = f"{PYTEST} -n 6 -m 'cuda and not slow' -k compile tests/python"

CALL_A: tuple[Stage, ...] = (
    (Part("load", 30, _LOAD, _OPS),),
    (
        Part("kernels, CPU = CUDA", 45, _SHARDS, _EMULATED_SHARDS),
        Part("hand-overs to the last block", 50, _STRESS, _EMULATED_STRESS),
    ),
    (
        Part("Python tests on CUDA", 115, _PYTHON, _LESS_PYTHON),
        *map(_sanitizer, ("memcheck", "initcheck", "racecheck", "synccheck")),
        *map(_planted, PLANTED),
    ),
    (Part("failures again, or C++ classes", 25, _AGAIN, _AGAIN),),
    (Part("benchmarks", 120, _ROWS, _QUICK_ROWS),),
    (Part("ncu", 40, _NCU, _KERNELS_RUN),),
    (Part("training", 55, _TRAINING, _SMALL_TRAINING),),
    (Part("large tensors, first ops in captures", 35, _LARGE, _CAPTURES),),
    (Part("compiled", 60, _COMPILED),),
)


def call_b() -> tuple[Stage, ...]:
    """What the environment names."""
    kernels = f'--gtest_filter="$KERNELS" {XML}/kernels.xml'
    library = "LD_LIBRARY_PATH={0}/site/torchfuse/lib:$LD_LIBRARY_PATH"
    rows = f'export PYTHONPATH={{0}}/site:$PYTHONPATH {library}\n{_ROWS} --only "$ROWS"'
    named = {
        "KERNELS": Part("kernels", 25, f"{KERNELS} {kernels}", f"{EMULATED} {kernels}"),
        "TESTS": Part("tests", 30, f"eval {PYTEST} -n 8 $TESTS", f"eval {PYTEST} $TESTS"),
        "BEFORE": Part("rows, before", 20, rows.format("$BEFORE")),
        "ROWS": Part("rows", 20, rows.format("$BUNDLE"), f'{_QUICK_ROWS} --only "$ROWS"'),
    }
    asked = {name for name in named if os.environ.get(name)}
    if "ROWS" not in asked:
        asked.discard("BEFORE")  # it is timed in these rows
    return ((Part("load", 20, _LOAD, _OPS),), *((named[name],) for name in named if name in asked))
