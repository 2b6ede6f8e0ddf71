# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks against other packages: who is missing is named, and who differs is not timed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import sys

import pytest
import torch

import compare
import run
from suites import packages, peers, scenarios
from suites.contenders import AGAIN, FUSED, OURS


def test_a_missing_peer_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("deepspeed", "bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, package, None)
    suite = importlib.reload(peers)
    classes = ("CPUAdam", "CPUAdagrad", "CPULion")
    missing = [f"DeepSpeed DeepSpeed{name}" for name in classes]
    missing += ["bitsandbytes AdamW", "bitsandbytes AdamW8bit", "torchao AdamW8bit"]
    assert sorted(suite.MISSING) == sorted(missing)
    for name, why in suite.MISSING.items():
        assert name.partition(" ")[0].lower() in why
    assert all(set(case.peers) <= {FUSED, AGAIN, suite.COMPILED} for case in suite.CASES)
    assert not any(case.others for case in suite.CASES)
    assert {case.optimizer for case in suite.CASES} == {"adam", "adagrad"}
    environment = dict.fromkeys(("gpu", "cpu", "threads", "cpu_isa", "torch", "date"))
    result = {"suite": "peers", "environment": environment, "missing": suite.MISSING}
    table = compare.table({**result, "cases": [], "peak_memory": [], "host_path": None})
    assert "missing: DeepSpeed DeepSpeedCPULion (ModuleNotFoundError: " in table


def test_a_contender_that_computes_something_else_is_not_timed() -> None:
    def wrong(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    (case,) = [case for case in peers.CASES if case.name == "adam/step/resnet50"]
    makes = dict(case.contenders)
    spoiled = peers.Case("adam", ((OURS, makes[OURS]), (FUSED, wrong)), 28, "tiny_400")
    message = r"adam/step/tiny_400: expected parameters of torch fused within 5e-06 of ours"
    with pytest.raises(RuntimeError, match=message):
        spoiled.prepare(torch.device("cpu"), 0)
    right = peers.Case("adam", tuple((name, makes[name]) for name in (OURS, FUSED)), 28, "tiny_400")
    assert right.prepare(torch.device("cpu"), 0).verified["params"] < peers.TOLERANCE


def test_what_moves_other_bytes_has_no_ratio() -> None:
    def far(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    (case,) = [case for case in peers.CASES if case.name == "adam/step/resnet50"]
    makes = dict(case.contenders)
    contenders = ((OURS, makes[OURS]), (FUSED, makes[FUSED]))
    other = peers.Case("adam", contenders, 28, "tiny_400", others=(("SGD", far, 12.0),))
    arguments = argparse.Namespace(device="cpu", seed=0, threads=1, rounds=3)
    row = run.run_case(other, arguments)
    assert set(row["ratios"]) == {FUSED}
    assert row["others"]["SGD"]["error"] > 1.0
    rate, median = row["gb_per_s"]["SGD"], row["seconds"]["SGD"]["median"]
    assert rate == pytest.approx(12.0 * row["numel"] / median / 1e9)
    environment = dict.fromkeys(("gpu", "cpu", "threads", "cpu_isa", "torch", "date"))
    result = {"suite": "peers", "environment": environment, "cases": [row]}
    table = compare.table({**result, "peak_memory": [], "host_path": None})
    assert re.search(
        r"^\| SGD \| adam/step/tiny_400 \| .* \| 12\.0 \| \d\.\de.\d+ \|$", table, re.M
    )


@pytest.mark.parametrize("name", [packages.COMPILED, scenarios.STATIC])
def test_what_torch_compiles_is_missing_where_it_cannot(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise AssertionError("made all the same")

    monkeypatch.setattr(packages, "compiler_error", lambda: "InvalidCxxCompiler: none found")
    suite = peers if name == packages.COMPILED else scenarios
    monkeypatch.setattr(suite, "MISSING", {})
    case: peers.Case | scenarios.Case
    if suite is peers:
        (whole,) = [case for case in peers.CASES if case.name == "adam/step/resnet50"]
        makes = dict(whole.contenders) | {name: fails}
        contenders = tuple((key, makes[key]) for key in (OURS, name, FUSED))
        case = peers.Case("adam", contenders, 28, "tiny_400", target=1.0)
    else:
        (large,) = [case for case in scenarios.CASES if case.name == "fp32/s3/large"]
        ours, fused = large.contenders[:2]
        compiled = dataclasses.replace(large.contenders[-1], make=fails)
        assert compiled.name == name
        case = dataclasses.replace(
            large, parameters="tiny_400", contenders=(ours, compiled, fused), target=1.0
        )
    monkeypatch.setattr(type(case), "prepare_host", lambda *_: {OURS: list}, raising=False)
    arguments = argparse.Namespace(device="cpu", seed=0, threads=1, rounds=2)
    row = run.run_case(case, arguments)
    assert set(row["ratios"]) == {FUSED}
    assert row["target"] is None
    assert name not in row["samples"]
    assert dict(suite.MISSING) == {name: "InvalidCxxCompiler: none found"}


def test_an_error_of_the_compiler_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(function: object) -> object:
        def run(values: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no compiler\nand much more")

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    packages.compiler_error.cache_clear()
    assert packages.compiler_error() == "RuntimeError: no compiler"
    packages.compiler_error.cache_clear()
