# SPDX-License-Identifier: BSD-3-Clause
"""Fused optimizers with apex's class names and torch.optim's behavior."""

from torchfuse.optimizers.fused_adagrad import FusedAdagrad
from torchfuse.optimizers.fused_adam import FusedAdam
from torchfuse.optimizers.fused_lamb import FusedLAMB
from torchfuse.optimizers.fused_lars import FusedLARS
from torchfuse.optimizers.fused_lion import FusedLion
from torchfuse.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from torchfuse.optimizers.fused_muon import FusedMuon
from torchfuse.optimizers.fused_novograd import FusedNovoGrad
from torchfuse.optimizers.fused_optimizer import FusedOptimizer
from torchfuse.optimizers.fused_sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLARS",
    "FusedLion",
    "FusedMixedPrecisionLamb",
    "FusedMuon",
    "FusedNovoGrad",
    "FusedOptimizer",
    "FusedSGD",
]
