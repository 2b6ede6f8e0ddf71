# SPDX-License-Identifier: BSD-3-Clause
"""Two models, two optimizers and three losses, as GANs have them."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from support.apex_programs import column, greatest_difference, networks, run
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

pytestmark = pytest.mark.processes

STEPS = 40
LOSSES = ("real", "fake", "G")


def in_plain_torch(skipped: Collection[int] = ()) -> dict[str, list[float]]:
    """Losses in fp32; in the skipped steps, the discriminator stays as it is."""
    torch.manual_seed(0)
    G, D = networks.dense(8, 32, 2), networks.dense(2, 32, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=5e-3, betas=(0.5, 0.999)) for m in (G, D)]
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    generator = torch.Generator().manual_seed(1)
    losses: dict[str, list[float]] = {name: [] for name in LOSSES}
    for step, real in enumerate(networks.points(32 * STEPS).split(32)):
        D.zero_grad()
        fake = G(torch.randn(32, 8, generator=generator))
        of_D = loss_of(D(real), ones), loss_of(D(fake.detach()), zeros)
        (of_D[0] + of_D[1]).backward()
        if step not in skipped:
            optimizers[1].step()
        G.zero_grad()
        of_G = loss_of(D(fake), ones)
        of_G.backward()
        optimizers[0].step()
        for name, loss in zip(LOSSES, (*of_D, of_G), strict=True):
            losses[name].append(loss.item())
    return losses


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_it_trains_as_in_fp32(level: str) -> None:
    steps, expected = run("train_gan", "--opt-level", level), in_plain_torch()
    tolerance = 1e-5 if level == "O0" else 5e-3
    for name in LOSSES:
        assert greatest_difference(column(steps, name), expected[name]) < tolerance
        assert max(expected[name]) - min(expected[name]) > 5e-2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_one_loss_skips_its_optimizer_and_halves_its_scale(level: str) -> None:
    scales = [2.0**12, 2.0**21, 2.0**14]
    steps = run("train_gan", "--opt-level", level, "--scales", *map(str, scales))
    seen = [scales[1], *column(steps, "scale1")]
    skipped = [step for step in range(STEPS) if seen[step + 1] < seen[step]]
    assert skipped[0] == 0
    assert len(skipped) < 10
    assert seen[-1] == scales[1] / 2 ** len(skipped)
    assert (set(column(steps, "scale0")), set(column(steps, "scale2"))) == ({2.0**12}, {2.0**14})
    expected = in_plain_torch(skipped)
    for name in LOSSES:
        assert greatest_difference(column(steps, name), expected[name]) < 1e-2
    assert greatest_difference(expected["real"], in_plain_torch()["real"]) > 2e-2
