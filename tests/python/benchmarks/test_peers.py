# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks against other packages: who is missing is named, and who differs is not timed."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import compare
from suites import peers
from suites.contenders import FUSED, OURS


def test_a_missing_peer_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    suite = importlib.reload(peers)
    packages = ("adam", "adagrad", "lion")
    assert list(suite.MISSING) == [f"DeepSpeed {package}" for package in packages]
    assert all("deepspeed" in why for why in suite.MISSING.values())
    assert all(suite.DEEPSPEED not in case.peers for case in suite.CASES)
    assert {case.optimizer for case in suite.CASES} == {"adam", "adagrad"}
    environment = dict.fromkeys(("gpu", "cpu", "threads", "cpu_isa", "torch", "date"))
    result = {"suite": "peers", "environment": environment, "missing": suite.MISSING}
    table = compare.table({**result, "cases": [], "peak_memory": [], "host_path": None})
    assert "missing: DeepSpeed lion (ModuleNotFoundError: " in table


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
