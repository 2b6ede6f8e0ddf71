# SPDX-License-Identifier: BSD-3-Clause
"""A generator and a discriminator with apex's amp: two models and optimizers, three losses.

Prints the losses and the loss scales after every step.
"""

import argparse

import torch
from apex import amp
from apex.optimizers import FusedAdam
from networks import dense, points


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--steps", type=int, default=40)
    # Scales that the program sets before it begins.
    parser.add_argument("--scales", type=float, nargs=3, default=[2.0**16] * 3)
    args = parser.parse_args()

    torch.manual_seed(0)
    G, D = dense(8, 32, 2), dense(2, 32, 1)
    optG = FusedAdam(G.parameters(), lr=5e-3, betas=(0.5, 0.999))
    optD = FusedAdam(D.parameters(), lr=5e-3, betas=(0.5, 0.999))
    [D, G], [optD, optG] = amp.initialize(
        [D, G], [optD, optG], opt_level=args.opt_level, num_losses=3, verbosity=0
    )
    if args.opt_level in ("O1", "O2"):
        for scaler, scale in zip(amp._amp_state.loss_scalers, args.scales):  # noqa: B905
            scaler._loss_scale = scale
    criterion = torch.nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    generator = torch.Generator().manual_seed(1)

    for step, real in enumerate(points(32 * args.steps).split(32)):
        D.zero_grad()
        loss_real = criterion(D(real), ones)
        with amp.scale_loss(loss_real, optD, loss_id=0) as scaled:
            scaled.backward()
        fake = G(torch.randn(32, 8, generator=generator))
        loss_fake = criterion(D(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, optD, loss_id=1) as scaled:
            scaled.backward()
        optD.step()
        G.zero_grad()
        loss_G = criterion(D(fake), ones)
        with amp.scale_loss(loss_G, optG, loss_id=2) as scaled:
            scaled.backward()
        optG.step()
        scales = [amp.state_dict()[f"loss_scaler{loss_id}"]["loss_scale"] for loss_id in range(3)]
        print(f"step {step} real {loss_real.item():.6f} fake {loss_fake.item():.6f}", end=" ")
        print(f"G {loss_G.item():.6f} scale0 {scales[0]} scale1 {scales[1]} scale2 {scales[2]}")


if __name__ == "__main__":
    main()
