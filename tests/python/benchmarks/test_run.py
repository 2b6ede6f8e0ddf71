# SPDX-License-Identifier: BSD-3-Clause
"""Every suite runs on tiny sets, and a contender that computes something else ends the run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpu_rows
import run
from suites import dtensor, fused_adam, layers, optimizers, packages, scale, scenarios
from suites.gpu import UnscaleCase
from suites.parameters import ParameterSet, load
from suites.steps import FUSED, OURS, Contender, StepCase, theirs

CPU = torch.device("cpu")
TINY = ParameterSet("tiny", ((33,), (4, 5), (1,)))
ARGUMENTS = run.parse_arguments(["--rounds", "2", "--threads", "1"])


@pytest.fixture(autouse=True)
def _one_thread_and_no_group() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    if dist.is_initialized():  # by the suite of DTensors
        dist.destroy_process_group()
        dtensor._mesh.cache_clear()


def cases() -> dict[str, Any]:
    """One case of each kind, on tiny sets."""
    found: dict[str, Any] = {}
    suites = [importlib.import_module(f"suites.{name}") for name in run.SUITES if name != "peers"]
    for suite in suites:
        for case in suite.CASES:
            kind = f"{suite.__name__.removeprefix('suites.')}/{case.name.rpartition('/')[0]}"
            if isinstance(case, StepCase):
                small = dataclasses.replace(TINY, moments=case.parameters.moments)
                found[kind] = dataclasses.replace(case, parameters=small)
            elif isinstance(case, fused_adam.NormCase | UnscaleCase):
                found[kind] = dataclasses.replace(case, parameters=TINY)
            elif isinstance(case, layers.LayerCase):
                shape = (4, 8, 3, 3) if len(case.shape) == 4 else (6, 40)
                found[kind] = dataclasses.replace(case, shape=shape)
    return found


CASES = cases()


assert len(CASES) > 60


@pytest.mark.parametrize("name", CASES)
def test_a_case_runs_on_tiny_tensors(name: str) -> None:
    case = CASES[name]
    row = run.run_case(case, ARGUMENTS)
    assert row["bytes"] == int(case.bytes_per_element * row["numel"])
    assert set(row["ratios"]) == set(row["seconds"]) - {case.subject} == set(case.peers)
    for entry in (*row["seconds"].values(), *row["ratios"].values()):
        assert 0 < entry["q1"] <= entry["median"] <= entry["q3"]
    assert set(row["streams"]) == {"in-place scale", "copy"}


def test_figures_of_a_case_are_those_of_rounds() -> None:
    case = SimpleNamespace(
        name="a", subject=OURS, peers=(FUSED,), parameters=TINY, bytes_per_element=28
    )
    samples = {OURS: [1.0, 2.0, 4.0], FUSED: [4.0, 2.0, 8.0]}
    samples |= {run.IN_PLACE: [2.0] * 3, run.COPY: [4.0] * 3}
    row = run.summary_of(case, samples, 8 * 10**9)
    assert row["seconds"][OURS] == {"q1": 1.5, "median": 2.0, "q3": 3.0}
    # The median of 4, 1 and 2; not 4 / 2, the ratio of the medians.
    assert row["ratios"] == {FUSED: {"q1": 1.5, "median": 2.0, "q3": 3.0}}
    samples[FUSED] = [1.0, 6.0, 4.0]
    assert run.summary_of(case, samples, 1)["ratios"][FUSED]["median"] == 1.0
    assert row["streams"] == {run.IN_PLACE: 4.0, run.COPY: 2.0}
    assert (row["tensors"], row["numel"], row["bytes"]) == (3, 54, 54 * 28)


@pytest.mark.parametrize("option", [{"lr": 1.001e-3}, {"betas": (0.9005, 0.999)}])
@pytest.mark.parametrize("masters", [False, True])
def test_a_contender_that_computes_something_else_ends_the_run(
    option: dict[str, Any], masters: bool
) -> None:
    case = dataclasses.replace(scenarios.case(masters, "s3", "tiny_400"), parameters=TINY)
    wrong = theirs(FUSED, torch.optim.AdamW, fused=True, weight_decay=0.01, **option)
    case = dataclasses.replace(case, contenders=(case.contenders[0], wrong))
    with pytest.raises(RuntimeError, match=r"expected .* of torch fused within 5e-06 of torchfuse"):
        case.prepare(CPU, 0)


def test_a_contender_that_skips_no_overflow_ends_the_run() -> None:
    class Careless(torch.amp.GradScaler):
        def _maybe_opt_step(self, optimizer: Any, *_: Any, **__: Any) -> None:
            optimizer.step()

    case = dataclasses.replace(scenarios.case(False, "s1", "tiny_400"), parameters=TINY)
    step = case._step(case.contenders[2], CPU, 0)  # the fused one decides itself
    step.scaler = Careless("cpu")
    step.scaler.scale(torch.zeros(()))
    with pytest.raises(RuntimeError, match="expected x to skip a step with an infinite gradient"):
        case._verification_steps("x", step, 0)


def test_a_layer_that_computes_something_else_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = layers.softmax_cross_entropy
    monkeypatch.setattr(layers, "softmax_cross_entropy", lambda *a, **b: 1.001 * exact(*a, **b))
    case = layers.LayerCase("x", "cross_entropy", (6, 40), torch.float32)
    with pytest.raises(RuntimeError, match=r"x: expected output within 0\.0001 of fp64"):
        case.prepare(CPU, 0)


def test_names_are_unique_and_each_suite_has_quick_cases() -> None:
    for name in run.SUITES:
        suite = importlib.import_module(f"suites.{name}")
        names = [case.name for case in suite.CASES]
        assert len(names) == len(set(names))
        assert run.selected(suite, "", quick=True)
    assert [case.name for case in run.selected(scale, "adam_float32/1000", False)] == [
        f"tensors/adam_float32/{count}" for count in (1000, 10_000, 100_000)
    ]
    assert "larc/step/resnet50" in [case.name for case in optimizers.CASES]


def test_a_run_writes_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder" / "result.json"
    words = ["--suite", "grad_scaler", "--only", "torch/tiny", "--rounds", "1", "--threads", "1"]
    assert run.main([*words, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert set(result) == {"suite", "context", "benchmarks", "missing"}
    assert result["context"]["torch"] == torch.__version__
    (row,) = result["benchmarks"]
    assert row["name"] == "step_update_against_torch/tiny_400"
    assert f"| {row['name']} | 400 |" in capsys.readouterr().out


def test_all_suites_run_in_their_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def started(command: list[str]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=int("rows" in command))

    monkeypatch.setattr(subprocess, "run", started)
    words = ["--suite", "all", "--quick", "--threads", "1", "--out", str(tmp_path)]
    assert run.main(words) == 1
    assert capsys.readouterr().err == "suites that failed: rows\n"
    names = [command[command.index("--suite") + 1] for command in commands]
    assert names == [name for name in run.SUITES if name != "gpu"]
    for name, command in zip(names, commands, strict=True):
        assert command[command.index("--out") + 1] == f"{tmp_path}/{name}.json"
        assert command[command.index("--threads") + 1] == "1"
        assert command[command.index("--rounds") + 1] == "5"
        assert command[-1] == "--quick"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "all", "--only", "adam"], "--only needs one suite, got --suite all"),
        (["--rounds", "0"], "expected --rounds to be at least 1, got 0"),
        (["--threads", "0"], "expected --threads to be at least 1, got 0"),
    ],
)
def test_arguments_that_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main(words)
    assert message in capsys.readouterr().err


def test_contenders_with_threads_of_their_own_begin_when_all_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads of DeepSpeed's step spin for milliseconds beside those of the next contender."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert packages.rest_between([OURS, FUSED], CPU) is None
    assert packages.rest_between([OURS, packages.DEEPSPEED], torch.device("cuda")) is None
    ours, theirs = fused_adam.case("step", "tiny_400", FUSED).contenders
    case = StepCase("a", TINY, (ours, Contender(packages.DEEPSPEED, theirs.make)), 28)
    run.run_case(case, run.parse_arguments(["--rounds", "1"]))
    assert set(slept) == {packages.REST_SECONDS}
    assert len(slept) == (1 + 2) * 4  # two warm-up rounds, and two streams


def test_rows_of_a_gpu_are_medians_in_microseconds() -> None:
    row = {
        "subject": OURS,
        "seconds": {OURS: {"median": 1e-3}, FUSED: {"median": 2e-3}},
        "host_seconds": {OURS: 1e-5, FUSED: 2e-5},
        "waits": [],
        "kernels": {OURS: 1, FUSED: 2},
        "bytes": 10**9,
        "streams": {run.COPY: 2000.0, run.IN_PLACE: 3000.0},
    }
    kept = gpu_rows.figures(row)
    assert kept["us"] == {OURS: 1000.0, FUSED: 2000.0}
    assert kept["host_us"] == {OURS: 10.0, FUSED: 20.0}
    assert (kept["gb_per_s"], kept["share"]) == (1000.0, 0.5)


def test_buckets_are_flat_buffers_that_tensors_share() -> None:
    plain, buckets = (load(name) for name in ("resnet50", "ddp_buckets"))
    tensors = buckets.randn(torch.float32, CPU, seed=0)
    assert tuple(tuple(tensor.shape) for tensor in tensors) == plain.shapes
    assert tensors[0].data_ptr() == tensors[1].data_ptr() + 4 * tensors[1].numel()
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(sizes.values()) == 4 * plain.numel
    assert sum(size >= 25 * 2**20 for size in sizes.values()) >= 3
