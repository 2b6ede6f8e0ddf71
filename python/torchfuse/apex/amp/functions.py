# SPDX-License-Identifier: BSD-3-Clause
"""Casts the arguments of functions that a program registers by name.

Note [What O1 casts]
apex replaces torch's functions for the rest of the program. torchfuse instead runs the models'
forward passes under autocast and casts the outputs to fp32. Losses and metrics outside the models
therefore see fp32, as with apex's list of fp32 functions. Backward passes, optimizers and other
models never run under autocast: torch advises against that, and autocast would reuse weights that
were cast before a step. Functions that a program registers cast arguments wherever they are called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchfuse.apex.amp.containers import converted, shortened, tensors_in, to_dtype, widened
from torchfuse.apex.amp.state import _amp_state

Function = Callable[..., Any]

_MARK = "_torchfuse_casts"


def half_function(fn: Function) -> Function:
    """Makes a function run in O1's 16-bit dtype.

    Under O1, fp32 arguments are cast to O1's dtype, fp16 or bf16. torch's functions run entirely in
    that dtype. Other functions run under autocast, which chooses a dtype for each operation.
    Without O1, and within `disable_casts()`, arguments are not cast.

    Args:
        fn (Callable): Function to decorate.

    Example:
        >>> import torch
        >>> from torchfuse.apex import amp
        >>> double = amp.half_function(lambda x: 2 * x)
        >>> double(torch.ones(2)).dtype  # O1 is not in force
        torch.float32
    """
    return _casting(fn, "half")


def float_function(fn: Function) -> Function:
    """Makes a function run in fp32.

    Under O1, 16-bit arguments are cast to fp32, and autocast is off within the function.

    Args:
        fn (Callable): Function to decorate.
    """
    return _casting(fn, "float")


def promote_function(fn: Function) -> Function:
    """Makes a function run in the widest dtype among the floating-point arguments, under O1.

    Args:
        fn (Callable): Function to decorate.
    """
    return _casting(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Replaces `module.name` by `half_function(module.name)`.

    Args:
        module (Any): Module or class that contains the function.
        name (str): The function's name.

    Raises:
        ValueError: if `module` has no such function.

    Example:
        >>> import types
        >>> from torchfuse.apex import amp
        >>> functions = types.SimpleNamespace(double=lambda x: 2 * x)
        >>> amp.register_half_function(functions, "double")
        >>> functions.double(3)
        6
    """
    _register("register_half_function", module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Replaces `module.name` by `float_function(module.name)`; see `register_half_function`."""
    _register("register_float_function", module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Replaces `module.name` by `promote_function(module.name)`; see `register_half_function`."""
    _register("register_promote_function", module, name, promote_function)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Suspends O1's casts within the context: models and registered functions do not cast.

    Example:
        >>> from torchfuse.apex import amp
        >>> with amp.disable_casts():
        ...     amp._amp_state.handle.is_active()
        False
    """
    with contextlib.ExitStack() as stack:
        for device_type in _autocast_devices():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        _amp_state.disabled_casts += 1
        try:
            yield
        finally:
            _amp_state.disabled_casts -= 1


def _autocast_devices() -> list[str]:
    """Returns the device types whose autocast is on in this thread."""
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [device_type for device_type in types if torch.is_autocast_enabled(device_type)]


def _casting(fn: Function, kind: str) -> Function:
    is_torchs = (getattr(fn, "__module__", None) or "").partition(".")[0] == "torch"

    @functools.wraps(fn)
    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = _amp_state.handle.dtype
        if not _amp_state.handle.is_active() or dtype is None:
            return fn(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if kind == "half":
            convert = shortened(dtype)
        elif kind == "float":
            convert = widened
        else:
            dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
            convert = to_dtype(functools.reduce(torch.promote_types, dtypes or [torch.float32]))
        args, kwargs = converted(args, convert), converted(kwargs, convert)
        # Autocast could cast the arguments of a torch function again.
        enabled = not is_torchs and kind != "float"
        with contextlib.ExitStack() as stack:
            for device_type in {tensor.device.type for tensor in tensors}:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
            return fn(*args, **kwargs)

    setattr(cast, _MARK, kind)
    return cast


def _register(
    caller: str, module: Any, name: str, decorate: Callable[[Function], Function]
) -> None:
    fn = getattr(module, name, None)
    if not callable(fn):
        owner = getattr(module, "__name__", repr(module))
        raise ValueError(
            f"amp.{caller}: expected {owner!r} to have a function {name!r}, got {fn!r}. Pass the "
            "module and name by which the program calls the function, such as (torch, 'einsum')."
        )
    if hasattr(fn, _MARK):
        fn = fn.__wrapped__  # registered before, perhaps with another cast
    setattr(module, name, decorate(fn))
