# SPDX-License-Identifier: BSD-3-Clause
"""A training program for apex, which knows nothing of torchfuse.

Prints the loss of each epoch; saves a checkpoint after each, and goes on from one if it is there.
"""

import argparse
import os

import apex
import torch
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedAdam
from apex.parallel.LARC import LARC


def make_data(count=256):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 8, generator=generator)
    targets = (inputs[:, :4].sum(dim=1) > inputs[:, 4:].sum(dim=1)).long()
    return inputs, targets


def make_optimizer(name, model):
    if name == "adam":
        return FusedAdam(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
                {"params": [p for p in model.parameters() if p.dim() == 1]},
            ],
            lr=5e-3,
            betas=(0.9, 0.98),
            adam_w_mode=True,
        )
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-4)
    return LARC(optimizer=sgd, trust_coefficient=0.05, clip=False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=["adam", "larc"], default="adam")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()
    assert multi_tensor_applier.available
    assert apex.optimizers.FusedAdam is FusedAdam

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = make_optimizer(args.optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start = 0
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        scaler.load_state_dict(checkpoint["scaler"])
        start = checkpoint["epoch"]

    inputs, targets = make_data()
    for epoch in range(start, args.epochs):
        total = 0.0
        for batch, target in zip(inputs.split(32), targets.split(32)):  # noqa: B905
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item() / 8
        scheduler.step()
        torch.save(
            {
                "epoch": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
            },
            args.checkpoint,
        )
        print(f"epoch {epoch} loss {total:.9f}")


if __name__ == "__main__":
    main()
