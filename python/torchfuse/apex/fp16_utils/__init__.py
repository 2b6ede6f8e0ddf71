# SPDX-License-Identifier: BSD-3-Clause
"""`apex.fp16_utils`: explicit fp16 training, for programs older than `apex.amp`."""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from torchfuse.apex.amp.models import convert_module, convert_network
from torchfuse.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from torchfuse.apex.fp16_utils.fp16util import (
    BN_convert_float,
    FP16Model,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    tofp16,
)
from torchfuse.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler, to_python_float

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
