# SPDX-License-Identifier: BSD-3-Clause
"""docs/examples/shortest_loop.py: it needs no more than another import, with a GPU and without."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).resolve().parents[3] / "docs/examples/shortest_loop.py"
OURS = "from torchfuse.amp import GradScaler, autocast\n"
TORCHS = "from torch.cuda.amp import GradScaler, autocast\n"


def run(code: str) -> dict[str, Any]:
    """The names of the program after its end."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(SystemExit) as end:
        exec(compile(code, str(PROGRAM), "exec"), scope)
    assert end.value.code == 0
    return scope


def parameters(scope: dict[str, Any]) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in scope["model"].parameters()]


def code_with(line: str) -> str:
    code = PROGRAM.read_text(encoding="utf-8")
    assert code.count(OURS) == 1
    return code.replace(OURS, line)


def test_it_names_no_device_type_in_its_loop() -> None:
    (loop,) = re.findall(r"# \[loop\]\n(.*)# \[end of loop\]", code_with(OURS), re.DOTALL)
    assert "GradScaler()" in loop
    assert "autocast()" in loop


def test_without_a_gpu_it_trains_in_bf16_with_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = run(code_with(OURS))
    assert ours["scaler"].get_scale() == 2.0**16
    explicit = code_with(TORCHS.replace(".cuda", "")).replace("autocast()", 'autocast("cpu")')
    theirs = run(explicit.replace("GradScaler()", 'GradScaler("cpu")'))
    # A power of two changes no bit of gradients that stay in range.
    unscaled = run(code_with(OURS).replace("GradScaler()", "GradScaler(enabled=False)"))
    for others in (theirs, unscaled):
        assert all(map(torch.equal, parameters(ours), parameters(others)))


@pytest.mark.cuda
def test_with_a_gpu_it_does_what_torchs_import_did() -> None:
    ours = run(code_with(OURS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that of torch.cuda.amp
        theirs = run(code_with(TORCHS))
    assert ours["scaler"].is_enabled()
    assert ours["scaler"].get_scale() == theirs["scaler"].get_scale()
    for mine, torchs in zip(parameters(ours), parameters(theirs), strict=True):
        torch.testing.assert_close(mine, torchs)
