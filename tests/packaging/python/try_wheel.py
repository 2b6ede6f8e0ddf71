# SPDX-License-Identifier: BSD-3-Clause
"""What a user does first with an installed wheel; prints what it took.

Needs neither a compiler nor a checkout: the release runs it in bare containers.
"""

import time

began = time.monotonic()
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

loaded = time.monotonic()
import torchfuse  # noqa: E402

imported = time.monotonic()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torchfuse.normalization.FusedLayerNorm(8))
optimizer = torchfuse.optimizers.FusedAdam(model.parameters(), lr=0.01, max_grad_norm=1.0)
scaler = torchfuse.amp.GradScaler("cpu")
compiled = torch.compile(model, backend="aot_eager")  # inductor needs a compiler on the CPU


def step() -> float:
    optimizer.zero_grad()
    loss = compiled(torch.ones(4, 8)).square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return float(loss.detach())


losses = [step()]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "checkpoint.pt")
    torchfuse.save_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler)
    losses.append(step())
    torchfuse.load_checkpoint(path, model=model, optimizer=optimizer, scaler=scaler)
losses.append(step())
assert losses[1] == losses[2] != losses[0], losses

maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
mapped = {line.split()[-1] for line in maps if "gomp" in line or "libomp" in line}
assert len(mapped) == 1, f"expected one OpenMP runtime, got {mapped}"
print(
    f"torch {torch.__version__}, {Path(torchfuse._C.__file__).parent.name}: torch imported in "
    f"{loaded - began:.1f} s, torchfuse in {imported - loaded:.1f} s, all in "
    f"{time.monotonic() - began:.1f} s"
)
