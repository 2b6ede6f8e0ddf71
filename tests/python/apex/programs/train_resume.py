# SPDX-License-Identifier: BSD-3-Clause
"""Training for apex that stops and goes on, at any level of amp.

Saves model, optimizer and amp on the way and at the end; loads them as apex advises, after
`amp.initialize`.
"""

import argparse
import os

import torch
from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from networks import TinyResNet, pictures


def make_optimizer(name, params):
    if name == "sgd":
        return FusedSGD(params, lr=0.1, momentum=0.9)
    return {"adam": FusedAdam, "lamb": FusedLAMB}[name](params, lr=0.01, weight_decay=0.01)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--optimizer", choices=["adam", "lamb", "sgd"], default="adam")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--output", default=".")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = TinyResNet()
    optimizer = make_optimizer(args.optimizer, model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    start = 0
    if args.resume is not None:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        start = checkpoint["step"]
    elif args.opt_level in ("O1", "O2"):
        # The first steps overflow.
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**24

    images, labels = pictures(16 * 8)
    for step in range(start, 8):
        part = slice(16 * step, 16 * (step + 1))
        loss = torch.nn.functional.cross_entropy(model(images[part]), labels[part])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9f}")
        if step in (4, 7):
            checkpoint = {
                "step": step + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(checkpoint, os.path.join(args.output, f"after{step}.pt"))


if __name__ == "__main__":
    main()
