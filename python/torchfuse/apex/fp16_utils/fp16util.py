# SPDX-License-Identifier: BSD-3-Clause
"""Converts networks to fp16, creates fp32 masters, and copies gradients and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchfuse.apex.amp.containers import converted, to_dtype
from torchfuse.apex.amp.models import convert_module, convert_network
from torchfuse.parallel.flat import flatten, unflatten


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


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a model's trainable parameters and their fp32 masters.

    Args:
        model (Module): Model with parameters in any dtype.
        flat_master (bool, default False): Concatenate all masters to one 1-dim tensor. All
            parameters must then have the same dtype.

    Returns:
        The parameters, and a list of as many masters. With `flat_master`, the list contains one
        master, whose gradient is zeros.

    Raises:
        ValueError: for parameters of several dtypes with `flat_master`.

    Example:
        >>> import torch
        >>> from torchfuse.apex.fp16_utils import prep_param_lists
        >>> params, masters = prep_param_lists(torch.nn.Linear(3, 2).half(), flat_master=True)
        >>> len(params), masters[0].shape, masters[0].dtype
        (2, torch.Size([8]), torch.float32)
    """
    params: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return params, [nn.Parameter(param.detach().clone().float()) for param in params]
    dtypes = {param.dtype for param in params}
    if len(dtypes) > 1:
        raise ValueError(
            "prep_param_lists: expected parameters of one dtype with flat_master=True, got "
            f"{sorted(map(str, dtypes))}. Leave flat_master out."
        )
    master = nn.Parameter(flatten([param.detach() for param in params]).float())
    master.grad = torch.zeros_like(master)
    return params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies the model parameters' gradients to the masters, in fp32.

    Args:
        model_params (Sequence[Tensor]): Parameters that `prep_param_lists` returned.
        master_params (Sequence[Tensor]): Masters that `prep_param_lists` returned.
        flat_master (bool, default False): Whether `master_params` contains one flat master. Every
            parameter must then have a gradient.

    Raises:
        ValueError: for a parameter without a gradient with `flat_master`.
    """
    if flat_master:
        grads = flatten([_grad_of(index, param) for index, param in enumerate(model_params)])
        master = master_params[0]
        if master.grad is None:
            master.grad = torch.empty_like(master)
        master.grad.copy_(grads)
        return
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = param.grad.to(master.dtype, copy=True)
        else:
            master.grad.copy_(param.grad)


def _grad_of(index: int, param: Tensor) -> Tensor:
    if param.grad is None:
        raise ValueError(
            f"model_grads_to_master_grads: expected model_params[{index}] to have a gradient, got "
            "None. With flat_master=True, every parameter needs a gradient."
        )
    return param.grad


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copies masters to the model parameters, rounded to the parameters' dtypes.

    Args:
        model_params (Sequence[Tensor]): Parameters that `prep_param_lists` returned.
        master_params (Sequence[Tensor]): Masters that `prep_param_lists` returned.
        flat_master (bool, default False): Whether `master_params` contains one flat master.
    """
    sources = unflatten(master_params[0], list(model_params)) if flat_master else master_params
    for param, master in zip(model_params, sources, strict=True):
        param.copy_(master)
