# SPDX-License-Identifier: BSD-3-Clause
"""Converts networks to fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchfuse.apex.amp.containers import converted, to_dtype
from torchfuse.apex.amp.models import convert_module, convert_network


class tofp16(nn.Module):
    """A module that casts the input to fp16.

    Example:
        >>> import torch
        >>> from torchfuse.apex.fp16_utils import tofp16
        >>> tofp16()(torch.ones(2)).dtype
        torch.float16
    """

    def forward(self, input: Tensor) -> Tensor:
        """Returns the input in fp16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Casts affine batch normalization to fp32, in a module and all submodules, in place.

    Args:
        module (Module): Module to change.

    Returns:
        `module`.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.affine:
            convert_module(layer, torch.float32)
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Casts a network to fp16 in place, except affine batch normalization, and casts the input.

    Args:
        network (Module): Network to change.

    Returns:
        `torch.nn.Sequential(tofp16(), network)`.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


class FP16Model(nn.Module):
    """Runs a network in fp16, except affine batch normalization, and casts inputs to fp16.

    Args:
        network (Module): Network, which is cast in place.

    Attributes:
        network (Module): The network.

    Example:
        >>> import torch
        >>> from torchfuse.apex.fp16_utils import FP16Model
        >>> FP16Model(torch.nn.Linear(2, 2))(torch.ones(1, 2)).dtype
        torch.float16
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """Calls the network with floating-point inputs cast to fp16."""
        return self.network(*converted(inputs, to_dtype(torch.float16)))
