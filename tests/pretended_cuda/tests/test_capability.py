# SPDX-License-Identifier: BSD-3-Clause
"""A card for which nothing was compiled: one sentence at the first use, and nothing is changed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torchfuse import _loader

PROGRAM = """
import torch, torchfuse
from torchfuse.optimizers import FusedAdam
param = torch.nn.Parameter(torch.zeros(8, device="cuda"))
param.grad = torch.ones_like(param)
optimizer = FusedAdam([param])
calls = {
    "step": optimizer.step,
    "norm": lambda: torchfuse.ops.multi_tensor_l2_norm([param.grad]),
    "layer_norm": lambda: torchfuse.normalization.FusedLayerNorm(8, device="cuda")(param),
}
for name, call in calls.items():
    try:
        call()
        print(name, "ran")
    except RuntimeError as error:
        print(name, "raised", error)
print("parameter", param.tolist())
print("torch works", (param + 1).sum().item())
"""


def outcomes(capability: int) -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PRETENDED_CUDA_CAPABILITY": str(capability)},
    )
    assert result.returncode == 0, result.stderr
    words = [line.partition(" ") for line in result.stdout.splitlines()]
    return {name: rest for name, _, rest in words}


def compiled_for() -> str:
    """The architectures as a user would name them."""
    entries = str(_loader.recorded_build()["cuda_architectures"]).split(",")
    return ", ".join(
        f"{number[:-1]}.{number[-1]}" + ("" if entry.endswith("-real") else "+PTX")
        for entry in entries
        for number in [entry.removesuffix("-real")]
    )


AGAIN = " pip install --no-cache-dir --force-reinstall --no-deps ."
REMEDIES = {
    75: f"Rebuild torchfuse for this GPU: TORCH_CUDA_ARCH_LIST=7.5{AGAIN}",
    70: "Rebuild torchfuse for this GPU with CUDA 12 and a matching torch, because CUDA 13 "
    f"supports only 7.5 and later: TORCH_CUDA_ARCH_LIST=7.0{AGAIN}",
    61: "Use a GPU of compute capability 7.0 or later, or the CPU.",
}


@pytest.mark.parametrize("capability", REMEDIES)
def test_one_sentence_names_the_card_and_the_remedy(capability: int) -> None:
    found = outcomes(capability)
    sentence = (
        f"expected a GPU for which torchfuse was compiled, of compute capability {compiled_for()}, "
        f"got cuda:0, Pretended CUDA device, of {capability / 10}. {REMEDIES[capability]}"
    )
    assert found["step"] == f"raised FusedAdam.step: {sentence}"
    assert found["norm"] == f"raised multi_tensor_l2_norm: {sentence}"
    assert found["layer_norm"].endswith(sentence)
    assert found["parameter"] == str([0.0] * 8)
    assert found["torch"] == "works 8.0"


def test_ptx_serves_later_cards() -> None:
    assert compiled_for().endswith("+PTX")
    assert outcomes(121)["step"] == "ran"
