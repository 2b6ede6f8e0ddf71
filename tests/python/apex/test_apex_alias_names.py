# SPDX-License-Identifier: BSD-3-Clause
"""What the names that programs import from the alias are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchfuse
import torchfuse.apex
from torchfuse import normalization
from torchfuse.apex import _normalization, _optimizers, amp, fp16_utils
from torchfuse.apex.native import amp_c, apex_c, fused_layer_norm_cuda, syncbn, xentropy_cuda
from torchfuse.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    flat,
)


def run(statements: str) -> dict[str, Any]:
    """Imports as a program does; what it has then."""
    names: dict[str, Any] = {}
    exec(statements, names)
    return names


# What it holds.


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("statements", "name", "expected"),
    [
        ("from apex.optimizers import FusedAdam as x", "x", _optimizers.FusedAdam),
        ("from apex.optimizers.fused_adam import FusedAdam as x", "x", _optimizers.FusedAdam),
        ("import apex; x = apex.optimizers.FusedAdam", "x", _optimizers.FusedAdam),
        ("import apex.optimizers as o; x = o.FusedAdam", "x", _optimizers.FusedAdam),
        ("from apex import optimizers; x = optimizers.FusedAdam", "x", _optimizers.FusedAdam),
        ("from apex.optimizers import *; x = FusedAdam", "x", _optimizers.FusedAdam),
        ("from apex import *; x = optimizers.FusedAdam", "x", _optimizers.FusedAdam),
        ("from apex.parallel.LARC import LARC as x", "x", LARC),
        ("import apex; x = apex.parallel.LARC.LARC", "x", LARC),
        ("from apex.parallel import LARC; x = LARC.LARC", "x", LARC),
        ("from apex.parallel import DistributedDataParallel as x", "x", DistributedDataParallel),
        ("import apex; x = apex.parallel.DistributedDataParallel", "x", DistributedDataParallel),
        ("from apex.parallel import Reducer as x", "x", Reducer),
        ("from apex.parallel import ReduceOp as x", "x", torch.distributed.ReduceOp),
        (
            "from apex.parallel.distributed import DistributedDataParallel as x",
            *("x", DistributedDataParallel),
        ),
        ("from apex.parallel.distributed import Reducer as x", "x", Reducer),
        ("from apex.parallel.distributed import flat_dist_call as x", "x", flat.flat_dist_call),
        ("import apex; x = apex.parallel.distributed.flatten", "x", flat.flatten),
        ("import apex; x = apex.parallel.distributed.unflatten", "x", flat.unflatten),
        ("from apex.parallel import SyncBatchNorm as x", "x", SyncBatchNorm),
        ("import apex; x = apex.parallel.SyncBatchNorm", "x", SyncBatchNorm),
        ("from apex.parallel import convert_syncbn_model as x", "x", convert_syncbn_model),
        (
            "from apex.parallel import create_syncbn_process_group as x",
            *("x", create_syncbn_process_group),
        ),
        (
            "from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as x",
            *("x", SyncBatchNorm),
        ),
        ("from apex.parallel.sync_batchnorm import SyncBatchNorm as x", "x", SyncBatchNorm),
        (
            "from apex.contrib.clip_grad import clip_grad_norm_ as x",
            *("x", torchfuse.clip_grad_norm_),
        ),
        (
            "from apex.contrib.clip_grad.clip_grad import clip_grad_norm_ as x",
            *("x", torchfuse.clip_grad_norm_),
        ),
        (
            "from apex.multi_tensor_apply import multi_tensor_applier as x",
            *("x", torchfuse.multi_tensor_apply.multi_tensor_applier),
        ),
        (
            "from apex.multi_tensor_apply import MultiTensorApply as x",
            *("x", torchfuse.multi_tensor_apply.MultiTensorApply),
        ),
        (
            "from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply as x",
            *("x", torchfuse.multi_tensor_apply.MultiTensorApply),
        ),
        ("from apex import amp; x = amp.initialize", "x", amp.initialize),
        ("import apex; x = apex.amp.scale_loss", "x", amp.scale_loss),
        ("import apex.amp as a; x = a.master_params", "x", amp.master_params),
        ("from apex.amp import _amp_state as x", "x", amp._amp_state),
        ("import apex.amp._amp_state; x = apex.amp._amp_state", "x", amp._amp_state),
        ("from apex.fp16_utils import *; x = FP16_Optimizer", "x", fp16_utils.FP16_Optimizer),
        ("from apex.optimizers import FP16_Optimizer as x", "x", fp16_utils.FP16_Optimizer),
        (
            "from apex.contrib.optimizers import FP16_Optimizer as x",
            *("x", fp16_utils.FP16_Optimizer),
        ),
        ("from apex.normalization import FusedLayerNorm as x", "x", normalization.FusedLayerNorm),
        (
            "from apex.normalization.fused_layer_norm import fused_rms_norm_affine as x",
            *("x", _normalization.fused_rms_norm_affine),
        ),
        (
            "from apex.contrib.layer_norm import FastLayerNorm as x",
            *("x", _normalization.FastLayerNorm),
        ),
        (
            "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss as x",
            *("x", _normalization.SoftmaxCrossEntropyLoss),
        ),
    ],
)
def test_names_are_torchfuses_own(statements: str, name: str, expected: Any) -> None:
    assert run(statements)[name] is expected


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("statements", "name", "expected"),
    [
        ("import amp_C; x = amp_C.multi_tensor_adam", "x", amp_c.multi_tensor_adam),
        ("from amp_C import multi_tensor_l2norm as x", "x", amp_c.multi_tensor_l2norm),
        ("import apex_C as c; x = c.flatten", "x", apex_c.flatten),
        ("from apex_C import *; x = unflatten", "x", apex_c.unflatten),
        ("from syncbn import welford_parallel as x", "x", syncbn.welford_parallel),
        ("import xentropy_cuda; x = xentropy_cuda.forward", "x", xentropy_cuda.forward),
        (
            "import fused_layer_norm_cuda as n; x = n.rms_forward_affine",
            *("x", fused_layer_norm_cuda.rms_forward_affine),
        ),
    ],
)
def test_native_modules_are_there_at_top_level(statements: str, name: str, expected: Any) -> None:
    assert run(statements)[name] is expected
