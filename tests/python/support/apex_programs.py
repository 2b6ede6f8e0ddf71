# SPDX-License-Identifier: BSD-3-Clause
"""Runs the programs for apex under the alias, and what they are compared with, in plain torch."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

import torchfuse

PROGRAMS = Path(__file__).resolve().parent.parent / "apex" / "programs"
PACKAGES = str(Path(torchfuse.__file__).resolve().parent.parent)

#: The models and the data of the programs.
networks = SimpleNamespace(**runpy.run_path(str(PROGRAMS / "networks.py"), run_name="networks"))


def run(name: str, *arguments: str, ranks: int = 0, alias: bool = True) -> list[dict[str, float]]:
    """Runs a program under the alias.

    Args:
        name: the program's.
        arguments: what it is given.
        ranks: processes under torchrun, which finds a free port. 0: one process without it.
        alias: False runs the program by itself, without apex.

    Returns:
        The numbers of each line that begins with a name and a number, as "step 3 loss 0.25".
    """
    launcher = [*("-m", "torch.distributed.run", "--standalone"), "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [
            *(sys.executable, *(launcher if ranks else [])),
            *(("-m", "torchfuse.apex") if alias else ()),
            *(str(PROGRAMS / f"{name}.py"), *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if re.match(r"\w+ \d", line)]
    return [dict(zip(line[::2], map(float, line[1::2]), strict=True)) for line in lines]


def column(lines: Sequence[dict[str, float]], name: str) -> list[float]:
    """One number of all lines."""
    return [line[name] for line in lines]


def greatest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the entries of two lists."""
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


class PlainLAMB(torch.optim.Optimizer):
    """LAMB as in You et al., with a limit of 1 for the norm of all gradients."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.01})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        params = [(group, p) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for _, p in params]).norm().clamp(min=1.0)
        for group, param in params:
            state, grad = self.state[param], param.grad / norm
            if not state:
                state.update(count=0, first=torch.zeros_like(grad), second=torch.zeros_like(grad))
            state["count"] += 1
            state["first"].mul_(0.9).add_(0.1 * grad)
            state["second"].mul_(0.999).add_(0.001 * grad.square())
            first = state["first"] / (1 - 0.9 ** state["count"])
            second = state["second"] / (1 - 0.999 ** state["count"])
            update = first / (second.sqrt() + 1e-6) + group["weight_decay"] * param
            trusted = param.norm() / update.norm() if group["weight_decay"] else 1.0
            param -= group["lr"] * trusted * update
