# SPDX-License-Identifier: BSD-3-Clause
"""Casts models' parameters, and the inputs and outputs of forward passes."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchfuse.apex.amp.containers import SHORT_DTYPES, converted, tensors_in, to_dtype, widened
from torchfuse.apex.amp.state import _amp_state
from torchfuse.normalization._autocast import forward_under_o1
from torchfuse.parallel import DistributedDataParallel

_KEY = "_amp_casts"
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, DistributedDataParallel)


@dataclasses.dataclass
class ForwardCasts:
    """The casts around one model's forward pass.

    Attributes:
        inputs: Dtype of floating-point inputs. None: unchanged.
        autocast: Autocast dtype for the forward pass. None: no autocast.
        outputs: Dtype of floating-point outputs. None: 16-bit outputs are cast to fp32.
        device_type: The model's device type when `amp.initialize` was called.
        forward: A forward function that the program assigned to the instance, or None.
        saves_fp32: Whether the model's state dicts contain fp32 copies of 16-bit entries.
    """

    inputs: torch.dtype | None
    autocast: torch.dtype | None
    outputs: torch.dtype | None
    device_type: str = "cpu"
    forward: Callable[..., Any] | None = None
    saves_fp32: bool = False

    def run(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `forward` with the casts."""
        if self.inputs is not None:
            cast = to_dtype(self.inputs)
            args, kwargs = (converted(value, cast, self.inputs) for value in (args, kwargs))
        with self._autocast(model, args, kwargs), self._under_o1():
            outputs = (self.forward or forward)(*args, **kwargs)
        if self.outputs is not None:
            return converted(outputs, to_dtype(self.outputs), self.outputs)
        return converted(outputs, widened)

    def _autocast(
        self, model: nn.Module, args: Any, kwargs: Any
    ) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None or _amp_state.disabled_casts:
            return contextlib.nullcontext()
        # DataParallel's replicas have no parameters.
        first = next(itertools.chain(model.parameters(), model.buffers()), None)
        tensors = [first] if first is not None else tensors_in((args, kwargs))
        device_type = tensors[0].device.type if tensors else self.device_type
        return torch.autocast(device_type, dtype=self.autocast)

    def _under_o1(self) -> contextlib.AbstractContextManager[None]:
        dtype = self.autocast
        return contextlib.nullcontext() if dtype is None else forward_under_o1(dtype)


def check_models(models: Sequence[Any]) -> None:
    """Checks the models passed to `initialize`, before anything changes."""
    for index, model in enumerate(models):
        where = f"amp.initialize: expected models[{index}] to be"
        if not isinstance(model, nn.Module):
            raise TypeError(f"{where} a torch.nn.Module, got {type(model).__name__}.")
        if isinstance(model, _WRAPPERS):
            raise RuntimeError(
                f"{where} the model itself, got {type(model).__name__}. Wrap the model after "
                "amp.initialize."
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(f"{where} a Python module, got a ScriptModule. Script the result.")
        if not _amp_state.allow_incoming_model_not_fp32:
            _check_fp32(where, model)


def _check_fp32(where: str, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.dtype in (*SHORT_DTYPES, torch.float64):
            hint = (
                "The model was passed to amp.initialize before."
                if _KEY in vars(model)
                else "Omit .half() and .double(): amp.initialize casts the model."
            )
            raise RuntimeError(
                f"{where} in fp32, got {param.dtype} for {name!r}. {hint} To allow this, set "
                "amp._amp_state.allow_incoming_model_not_fp32 = True."
            )


# Parameters.


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters, gradients and buffers of one module, in place.

    Args:
        module (Module): Module to cast, without submodules.
        dtype (dtype): Target dtype.
    """
    for param in module._parameters.values():
        if param is not None and param.is_floating_point() and param.dtype != dtype:
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad = param.grad.to(dtype)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts a network in place, except affine batch normalization, and returns the network.

    Args:
        network (Module): Network to cast.
        dtype (dtype): Target dtype.

    Example:
        >>> import torch
        >>> from torchfuse.apex.fp16_utils import convert_network
        >>> layers = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
        >>> network = convert_network(torch.nn.Sequential(*layers), torch.float16)
        >>> [layer.weight.dtype for layer in network]
        [torch.float16, torch.float32]
    """
    for module in network.modules():
        if not (isinstance(module, _BatchNorm) and module.affine):
            _convert_and_flatten(module, dtype)
    return network


def convert_all(network: nn.Module, dtype: torch.dtype) -> None:
    """Casts a network in place, including batch normalization."""
    for module in network.modules():
        _convert_and_flatten(module, dtype)


def _convert_and_flatten(module: nn.Module, dtype: torch.dtype) -> None:
    convert_module(module, dtype)
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()


# The forward pass.


def add_casts(model: nn.Module, casts: ForwardCasts) -> None:
    """Adds casts around a model's forward pass, replacing earlier casts.

    Note [A class with casts]
    The model becomes an instance of a subclass that overrides forward(). A function stored on the
    instance would not do: in copies made by copy.deepcopy (averaged weights, for example) and in
    DataParallel's replicas, the function would still call the original model. `isinstance`, names
    and the signature do not change.
    """
    before: ForwardCasts | None = vars(model).get(_KEY)
    casts.forward = vars(model).pop("forward", before.forward if before else None)
    casts.saves_fp32 = before is not None and before.saves_fp32
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    if first is not None:
        casts.device_type = first.device.type
    vars(model)[_KEY] = casts
    if before is None:
        # torch.compile's wrapper would forward a plain assignment to the wrapped model.
        object.__setattr__(model, "__class__", _class_with_casts(type(model)))


def _class_with_casts(base: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of `base` with casts; creates the subclass once."""
    for known in base.__subclasses__():
        if _KEY in vars(known):
            return known

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        casts: ForwardCasts | None = vars(self).get(_KEY)
        if casts is None:  # the instance was created by the model, as a slice of a Sequential is
            return base.forward(self, *args, **kwargs)
        return casts.run(self, functools.partial(base.forward, self), args, kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = base.__reduce_ex__(self, protocol)
        # pickle looks classes up by name and would find the base class.
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_new_with_casts, (base,), *reduced[2:])
        return reduced

    namespace = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": __reduce_ex__,
        "forward": forward,
        _KEY: None,  # marks the class; a model stores a ForwardCasts under this key
    }
    metaclass: Any = type(base)
    created: type[nn.Module] = metaclass(base.__name__, (base,), namespace)
    return created


def _new_with_casts(base: type[nn.Module]) -> nn.Module:
    with_casts = _class_with_casts(base)
    return with_casts.__new__(with_casts)


# State dicts.


def save_in_fp32(model: nn.Module) -> None:
    """Makes `model.state_dict()` return 16-bit entries in fp32; the model must have casts."""
    casts: ForwardCasts = vars(model)[_KEY]
    if not casts.saves_fp32:
        model.register_state_dict_post_hook(_state_in_fp32)
        casts.saves_fp32 = True


def _state_in_fp32(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for key, value in state_dict.items():
        if key.startswith(prefix) and isinstance(value, Tensor) and value.dtype in SHORT_DTYPES:
            state_dict[key] = value.to(torch.float32)
