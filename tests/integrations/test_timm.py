# SPDX-License-Identifier: BSD-3-Clause
"""timm under the alias: its ApexScaler, its optimizers by name, its fast normalization."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchfuse

PROGRAM = """\
import json
import sys
import torch
import timm
from timm.layers import fast_norm
from timm.optim import create_optimizer_v2
from timm.utils import ApexScaler, NativeScaler
from timm.utils.cuda import has_apex

level, name = sys.argv[1:]
torch.manual_seed(0)
fast_norm.set_fast_norm()
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2,
    num_classes=4,
)
if name.startswith("fused"):
    # timm wants a GPU before it imports from apex; these optimizers do not.
    torch.cuda.is_available = lambda: True
optimizer = create_optimizer_v2(model, opt=name, lr=3e-3, weight_decay=0.05, momentum=0.9)
torch.cuda.is_available = lambda: False
scaler = NativeScaler("cpu")
if level != "none":
    from apex import amp

    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    scaler = ApexScaler()
generator = torch.Generator().manual_seed(1)
labels = torch.arange(16) % 4
images = torch.randn(16, 3, 16, 16, generator=generator) + labels.view(-1, 1, 1, 1)
losses = []
for _ in range(15):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    losses.append(loss.item())
print(json.dumps({
    "losses": losses, "has_apex": has_apex, "fast_norm": fast_norm.has_apex,
    "optimizer": type(optimizer).__module__, "state": scaler.state_dict(),
}))
"""


def train(folder: Path, level: str, optimizer: str, alias: bool = True) -> dict[str, Any]:
    """A vision transformer of timm's; `level` is amp's, or none for GradScaler."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    command = [*(("-m", "torchfuse.apex") if alias else ()), "train.py", level, optimizer]
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(Path(torchfuse.__file__).resolve().parent.parent)},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Without apex, in fp32."""
    found = train(tmp_path_factory.mktemp("plain"), "none", "adamw", alias=False)
    assert (found["has_apex"], found["fast_norm"]) == (False, False)
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    return found


@pytest.mark.parametrize(
    ("level", "optimizer", "tolerance"),
    [
        ("O0", "adamw", 1e-4),
        ("O1", "adamw", 3e-2),
        ("O2", "adamw", 3e-2),
        ("O2", "fusedadamw", 3e-2),
    ],
)
def test_apex_scaler_trains_as_timms_own_in_fp32(
    level: str, optimizer: str, tolerance: float, expected: dict[str, Any], tmp_path: Path
) -> None:
    found = train(tmp_path, level, optimizer)
    assert (found["has_apex"], found["fast_norm"]) == (True, True)
    assert found["optimizer"].startswith("torch" if optimizer == "adamw" else "torchfuse")
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert set(found["state"]["loss_scaler0"]) == {"loss_scale", "unskipped"}
