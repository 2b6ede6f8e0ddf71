# SPDX-License-Identifier: BSD-3-Clause
"""A training program for apex with amp, which knows nothing of torchfuse.

Prints the loss of each epoch; saves a checkpoint after each, and goes on from one if it is there.
"""

import argparse
import os

import torch
from apex import amp
from apex.optimizers import FusedLAMB
from apex.parallel import DistributedDataParallel as ApexDDP
from apex.parallel import convert_syncbn_model


def make_data(count=256):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 8, generator=generator)
    targets = (inputs[:, :4].sum(dim=1) > inputs[:, 4:].sum(dim=1)).long()
    return inputs, targets


class ApexScaler:
    def __call__(self, loss, optimizer, clip_grad=None, create_graph=False):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip_grad)
        optimizer.step()

    def state_dict(self):
        if "state_dict" in amp.__dict__:
            return amp.state_dict()

    def load_state_dict(self, state_dict):
        if "load_state_dict" in amp.__dict__:
            amp.load_state_dict(state_dict)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    )
    model = convert_syncbn_model(model)
    optimizer = FusedLAMB(model.parameters(), lr=2e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    model = ApexDDP(model, delay_allreduce=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = ApexScaler()
    start = 0
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        scaler.load_state_dict(checkpoint["amp"])
        start = checkpoint["epoch"]

    inputs, targets = make_data()
    for epoch in range(start, args.epochs):
        total = 0.0
        for batch, target in zip(inputs.split(32), targets.split(32)):  # noqa: B905
            loss = torch.nn.functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            scaler(loss, optimizer, clip_grad=1.0)
            total += loss.item() / 8
        scheduler.step()
        torch.save(
            {
                "epoch": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "amp": scaler.state_dict(),
            },
            args.checkpoint,
        )
        print(f"epoch {epoch} loss {total:.9f}")


if __name__ == "__main__":
    main()
