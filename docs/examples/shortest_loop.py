# SPDX-License-Identifier: BSD-3-Clause
"""The shortest loop in mixed precision, on a GPU where there is one and on the CPU elsewhere."""

import torch
from torch import nn

from torchfuse.amp import GradScaler, autocast

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
points = torch.randn(512, 16, device=device)
labels = (points.sum(dim=1) > 0).long()
loader = list(zip(points.split(64), labels.split(64), strict=True)) * 25

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# [loop]
scaler = GradScaler()
for x, y in loader:
    optimizer.zero_grad()
    with autocast():
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
# [end of loop]
with torch.no_grad(), autocast():
    accuracy = float((model(points).argmax(dim=1) == labels).float().mean())
print(f"shortest_loop.py: accuracy {accuracy:.3f} on {device}, scale {scaler.get_scale():.0f}")
raise SystemExit(0 if accuracy > 0.95 else 1)
