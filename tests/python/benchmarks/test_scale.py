# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of growing sizes: what it measures, what it skips, and whom it does not time."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpp_programs import BUILD

import data_parallel
import machine
import result_file
import scale
from suites import scale_processes, scale_sizes, scale_steps
from suites.contenders import FOREACH, FUSED, OURS
from suites.scale_norms import ALONE, PEER
from suites.scale_points import SAMPLE, calls_for, measured
from suites.scale_steps import ADAM, ADAM_TENSORS, SGD, Curve

ROOT = Path(__file__).resolve().parents[3]
WORDS = ["--quick", "--rounds", "2", "--build", str(BUILD)]
CURVES = pytest.mark.parametrize("curve", [ADAM, ADAM_TENSORS, SGD], ids=lambda curve: curve.name)


def quick(axis: str) -> argparse.Namespace:
    return scale.parse_arguments([*WORDS, "--axis", axis])


def check(result: dict[str, Any], names: list[str], contenders: set[str]) -> None:
    """Whatever the times are."""
    assert [case["name"] for case in result["cases"]] == names
    for case in result["cases"]:
        assert set(case["seconds"]) == set(case["samples"]) == contenders
        assert set(case["ratios"]) == contenders - {case_subject(case)}
        assert all(seconds > 0 for found in case["samples"].values() for seconds in found)
    for fit in result["fits"]:
        assert fit["fixed_s"] >= 0
        assert fit["per_unit_s"] >= 0
        sizes = [case["size"] for case in result["cases"] if case["curve"] == fit["curve"]]
        assert [segment["to"] for segment in fit["segments"]] == sizes[1:]


def case_subject(case: dict[str, Any]) -> str:
    return data_parallel.SUBJECT if case["axis"] == "data_parallel" else OURS


def test_a_run_over_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder" / "result.json"
    threads = torch.get_num_threads()
    assert scale.main([*WORDS, "--axis", "tensors", "--out", str(out)]) == 0
    assert torch.get_num_threads() == threads
    result = json.loads(out.read_text())
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["processors"] == os.cpu_count()
    assert result["environment"]["quick"]
    assert result["skipped"] == {}
    names = [f"tensors/adam_float32/{tensors}" for tensors in (1, 10, 100)]
    check(result, names, {OURS, FUSED, FOREACH})
    for case in result["cases"]:
        assert (case["threads"], case["numel"]) == (1, 64 * case["tensors"])
        assert case["model_bytes"] == 28 * case["numel"]
        assert 0 <= case["verified"] <= 1e-4
    assert [fit["contender"] for fit in result["fits"]] == [OURS, FUSED, FOREACH]
    printed = capsys.readouterr().out
    assert f"| {names[2]} | {FUSED} |" in printed
    assert f"| tensors/adam_float32 | {OURS} |" in printed


def test_a_run_over_elements_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    result = scale.run_axes(quick("elements"))
    assert result["skipped"] == {}
    for curve, contenders in ((ADAM, {OURS, FUSED}), (SGD, {OURS, FOREACH})):
        cases = [case for case in result["cases"] if f"/{curve.name}/" in case["name"]]
        check(
            {"cases": cases, "fits": []},
            [f"elements/{curve.name}/threads_{n}/2^{k}" for k in (10, 12, 14) for n in (1, 2)],
            contenders,
        )
        assert [case["threads"] for case in cases] == [1, 2] * 3
    # Each number of threads is a curve of its own.
    assert len(result["fits"]) == 2 * 2 * 2
    assert len({(fit["curve"], fit["contender"]) for fit in result["fits"]}) == 8


@pytest.mark.processes
def test_a_run_over_processes_with_batch_norm() -> None:
    result = scale.run_axes(quick("sync_batch_norm"))
    names = [f"sync_batch_norm/processes_{count}" for count in (1, 2)]
    check(result, names, {OURS, PEER, ALONE})
    for case in result["cases"]:
        assert set(case["verified"]) == {"output", "grad_input", "grad_weight"}
    assert [fit["contender"] for fit in result["fits"]] == [OURS, PEER, ALONE]


@pytest.mark.processes
def test_a_run_over_processes_with_a_model() -> None:
    arguments = quick("data_parallel")
    if not data_parallel.program_of(BUILD).exists():
        pytest.skip(f"the C++ side is not built in {BUILD}; make programs builds it")
    result = scale.run_axes(arguments)
    names = [f"data_parallel/mlp/processes_{count}" for count in (1, 2)]
    check(result, names, {data_parallel.SUBJECT, scale_processes.PEER})


def test_a_point_that_does_not_fit_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Beside 512 MiB, fp32 Adam on 2^14 elements needs a quarter of a MiB.
    monkeypatch.setattr(machine, "available_mib", lambda: 512)
    monkeypatch.setattr(scale_sizes, "ELEMENTS", (2**14, 2**28, 2**31))
    monkeypatch.setattr(scale_sizes, "measure", lambda *_: {1: {"seconds": {}}, 2: {"seconds": {}}})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    arguments = scale.parse_arguments(["--axis", "elements"])
    result = scale.run_axes(arguments)
    assert [case["name"] for case in result["cases"]] == [
        f"elements/{curve}/threads_{threads}/2^14"
        for curve in ("adam_float32", "sgd_bfloat16")
        for threads in (1, 2)
    ]
    reasons = result["skipped"]
    assert len(reasons) == 2 * 2 * 2
    needs = {"adam_float32/threads_1/2^28": "4,608", "adam_float32/threads_2/2^31": "33,280"}
    needs |= {"sgd_bfloat16/threads_1/2^28": "1,536", "sgd_bfloat16/threads_2/2^31": "8,704"}
    for name, mib in needs.items():
        expected = f"needs {mib} MiB of memory, 512 MiB are available"
        assert reasons[f"elements/{name}"] == expected


def test_more_threads_than_processors_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    result = scale.run_axes(quick("elements"))
    assert {case["threads"] for case in result["cases"]} == {1}
    assert len(result["skipped"]) == 2 * 3
    reason = result["skipped"]["elements/adam_float32/threads_2/2^10"]
    assert reason == "needs 2 processors, got 1"


@pytest.mark.parametrize("axis", ["tensors", "sync_batch_norm", "data_parallel"])
def test_every_axis_asks_for_memory(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_mib", lambda: 1)
    monkeypatch.setattr(data_parallel, "program_of", lambda _: Path(__file__))
    result = scale.run_axes(quick(axis))
    assert (result["cases"], result["fits"]) == ([], [])
    assert result["skipped"]
    for reason in result["skipped"].values():
        assert reason.endswith(" MiB of memory, 1 MiB are available")


def test_a_build_without_the_program_is_a_reason(tmp_path: Path) -> None:
    words = ["--quick", "--axis", "data_parallel", "--build", str(tmp_path / "other")]
    result = scale.run_axes(scale.parse_arguments(words))
    assert result["skipped"]["data_parallel/mlp/processes_2"] == (
        "needs torchfuse_bench_data_parallel, which is not built in other"
    )


@CURVES
def test_contenders_that_compute_the_same(curve: Curve) -> None:
    assert scale_steps.verify(curve, 3, 1000, 0) <= scale_steps.TOLERANCES[curve.dtype]


@CURVES
def test_a_contender_that_computes_something_else(
    curve: Curve, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = scale_steps.make

    def wrong(curve: Curve, name: str, params: scale_steps.Parameters) -> torch.optim.Optimizer:
        optimizer = make(curve, name, params)
        if name == OURS:
            optimizer.param_groups[0]["lr"] *= 1.02
        return optimizer

    monkeypatch.setattr(scale_steps, "make", wrong)
    message = rf"{curve.name}, {OURS}: expected the change of parameter 0 within .* got 0\.0"
    with pytest.raises(RuntimeError, match=message):
        scale_steps.verify(curve, 3, 1000, 0)


def test_contenders_that_do_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would agree, but nothing would be verified."""
    monkeypatch.setattr(scale_steps, "LEARNING_RATE", 0.0)
    with pytest.raises(RuntimeError, match="got nan"):
        scale_steps.verify(SGD, 1, 64, 0)


def test_contenders_step_the_same_memory() -> None:
    params = scale_steps.parameters_of(ADAM_TENSORS, 2, 64, 0)
    steps = scale_steps.steps(ADAM_TENSORS, params)
    for step in steps.values():
        before = [param.detach().clone() for param in params]
        step()
        assert all(bool((param != old).any()) for param, old in zip(params, before, strict=True))
    ours, *others = (step.__self__ for step in steps.values())  # type: ignore[attr-defined]
    for other in others:
        for param in params:
            for moment in ("exp_avg", "exp_avg_sq"):
                assert other.state[param][moment] is ours.state[param][moment]


@CURVES
def test_needed_memory_is_that_of_the_tensors(curve: Curve) -> None:
    params = scale_steps.parameters_of(curve, 2, 1000, 0)
    scale_steps.steps(curve, params)
    tensors = 2 * (4 if curve.has_moments else 2)
    used = tensors * params[0].nbytes
    assert 0 <= curve.needed_bytes(2, 1000) - used - scale_steps.MARGIN <= 2 * scale_steps.OBJECTS


@pytest.mark.parametrize("numel", [1, scale_steps.BLOCK - 1, 2 * scale_steps.BLOCK + 3])
def test_values_are_filled_to_the_end(numel: int) -> None:
    tensor = torch.full((numel,), torch.nan)
    scale_steps.filled(tensor, torch.Generator().manual_seed(0))
    assert bool(tensor.isfinite().all())
    for begin in range(0, numel, scale_steps.BLOCK):
        repeated = tensor[begin : begin + scale_steps.BLOCK]
        assert torch.equal(repeated, tensor[: len(repeated)])


def test_a_sample_is_long_and_its_time_is_that_of_one_call() -> None:
    assert calls_for(SAMPLE / 10) == 10
    assert calls_for(2 * SAMPLE) == 1
    done: list[str] = []
    functions = {name: lambda name=name: done.append(name) for name in ("a", "b")}
    figures = measured(functions, {"a": 3, "b": 2}, rounds=4)
    assert (done.count("a"), done.count("b")) == (3 * 6, 2 * 6)  # with two rounds of warm-up
    assert figures["calls"] == {"a": 3, "b": 2}
    assert [len(found) for found in figures["samples"].values()] == [4, 4]


def test_a_committed_result_needs_a_clean_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = result_file.COMMITTED / "amd-epyc-cpu" / "result.json"
    monkeypatch.setattr(machine, "git", lambda *_: " M benchmarks/scale.py")
    with pytest.raises(SystemExit, match="expected a clean git tree for a result in benchmarks/re"):
        scale.main([*WORDS, "--out", str(committed)])
    monkeypatch.setattr(machine, "git", lambda *_: "")
    assert result_file.prepare(committed, "scale") == committed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--axis", "vgg"], "invalid choice: 'vgg'"),
        (["--rounds", "0"], "expected --rounds to be at least 1, got 0"),
    ],
)
def test_arguments_that_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scale.parse_arguments(words)
    assert message in capsys.readouterr().err


def test_the_printed_ratio_is_that_of_rounds() -> None:
    rounds = {"median": 1.5, "low": 1.0, "high": 2.0}
    case = {"ratios": {"torch fused": {"of_medians": 7.0, "per_round": rounds}}}
    assert scale._ratio(case, "torch fused") == "1.500x (1.000 to 2.000)"
