# SPDX-License-Identifier: BSD-3-Clause
"""Layer-wise adaptive learning rates (You, Gitman and Ginsburg 2017) around any optimizer."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor

from torchfuse._delegation import attribute_of
from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.distributed import refuse_norm_groups

# Parameters and gradients of one group, by computation dtype, device and mesh of DTensors.
_Layers = dict[tuple[torch.dtype, torch.device, Any], tuple[list[Tensor], list[Tensor]]]


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns norms in `dtype`; some torch versions do not support dtype= for sharded DTensors."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return torch.stack(torch._foreach_norm(tensors))
    return torch.stack(torch._foreach_norm(tensors, dtype=dtype))


class LARC(torch.optim.Optimizer):
    r"""Adapts each parameter's learning rate to the norms of the parameter and the gradient.

    Before the wrapped optimizer's step, the gradient :math:`g` of each parameter :math:`p` is
    replaced in place by

    .. math::
        \eta &= \tau \frac{\lVert p \rVert}{\lVert g \rVert + \lambda \lVert p \rVert + \epsilon} \\
        \eta &\leftarrow \min(\eta / \gamma, 1) \quad \text{(clip=True)} \\
        g &\leftarrow \eta \, (g + \lambda p)

    with the group's learning rate :math:`\gamma` and weight decay :math:`\lambda`. The wrapped
    optimizer then steps without weight decay. With `clip=True`, the effective learning rate is
    :math:`\min(\gamma, \eta)` (LARC). With `clip=False`, the effective learning rate is
    :math:`\gamma \eta` (LARS; You, Gitman and Ginsburg, "Large batch training of convolutional
    networks", 2017). If the gradient's norm or the parameter's norm is 0, the gradient is
    unchanged. With `maximize`, :math:`\lambda p` is subtracted.

    LARC is an optimizer, so schedulers, gradient scalers and hooks accept a LARC object. LARC
    shares `param_groups`, `state`, `defaults` and state dicts with the wrapped optimizer, so
    checkpoints load with and without LARC.

    Args:
        optimizer (torch.optim.Optimizer): Optimizer to wrap. Must not require a closure.
        trust_coefficient (float, default 0.02): :math:`\tau`, above 0.
        clip (bool, default True): Limit the learning rate to :math:`\eta` (LARC). If False,
            multiply the learning rate by :math:`\eta` (LARS).
        eps (float, default 1e-8): :math:`\epsilon`, at least 0.

    Attributes:
        optim: The wrapped optimizer.
        trust_coefficient: The constructor argument; may be changed.
        clip: The constructor argument; may be changed.
        eps: The constructor argument; may be changed.

    Raises:
        TypeError: If `optimizer` is not an optimizer or requires a closure.
        ValueError: If a value is out of range.

    Example:
        >>> import torch
        >>> from torchfuse.parallel import LARC
        >>> layer = torch.nn.Linear(4, 1)
        >>> optimizer = LARC(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))
        >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        >>> layer(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.zero_grad()

    Notes:
        Norms are computed in fp32 (fp64 for fp64 gradients), and 16-bit gradients are rounded once.
        The step does not synchronize the host with the device.

        With a gradient scaler, pass LARC to `scaler.step` and `scaler.unscale_`, never the wrapped
        optimizer, because LARC needs the norms of unscaled gradients. The scaler unscales before
        the step because LARC has no attribute `_step_supports_amp_scaling`, even if the wrapped
        optimizer has that attribute.

        Differences from apex.parallel.LARC:

        - LARC is a torch.optim.Optimizer, and `step` accepts a closure.
        - The weight decay is restored even if the step fails.
        - The host does not wait for the device.
        - 16-bit norms cannot overflow.
        - `maximize` is supported.
        - Sparse gradients raise an error.
    """

    optim: torch.optim.Optimizer
    trust_coefficient: float
    clip: bool
    eps: float

    # Properties, because the wrapped optimizer replaces its groups when it loads a checkpoint.
    param_groups: list[dict[str, Any]] = attribute_of(
        "optim", "param_groups", "Parameter groups of the wrapped optimizer."
    )
    state: defaultdict[Tensor, Any] = attribute_of(
        "optim", "state", "State of the wrapped optimizer."
    )
    defaults: dict[str, Any] = attribute_of(
        "optim", "defaults", "Defaults of the wrapped optimizer."
    )
    ema_weights: Callable[[], contextlib.AbstractContextManager[None]] = attribute_of(
        "optim", "ema_weights", "The method of the wrapped optimizer, if it keeps averages."
    )
    swap_ema_: Callable[[], None] = attribute_of(
        "optim", "swap_ema_", "The method of the wrapped optimizer, if it keeps averages."
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "LARC: expected optimizer to be a torch.optim.Optimizer, "
                f"got {type(optimizer).__name__}."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LARC: expected optimizer to step once for each gradient, got "
                f"{type(optimizer).__name__}, whose step computes gradients several times."
            )
        refuse_norm_groups("LARC", optimizer)
        _check_number("trust_coefficient", trust_coefficient, above_zero=True)
        _check_number("eps", eps, above_zero=False)
        # torch's constructor would create separate groups and state. torch's __setstate__, which
        # exists for pickled optimizers, only creates the hooks and the wrapper around step().
        self.__setstate__(
            dict(optim=optimizer, trust_coefficient=trust_coefficient, clip=clip, eps=eps)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("optim", "trust_coefficient", "clip", "eps")}

    def __repr__(self) -> str:
        return (
            f"LARC (trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}) "
            f"around {self.optim!r}"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the wrapped optimizer.

        Args:
            param_group (dict): Group with ``params`` and options.
        """
        self.optim.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Resets the gradients of all parameters.

        Args:
            set_to_none (bool | None, default None): Passed to the wrapped optimizer. None means the
                wrapped optimizer's default.
        """
        if set_to_none is None:
            self.optim.zero_grad()
        else:
            self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state dict, without LARC's arguments."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict: dict[str, Any] = self.optim.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replacement = post_hook(self, state_dict)
            if replacement is not None:
                state_dict = replacement
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into the wrapped optimizer.

        Args:
            state_dict (dict): A result of `state_dict()`, from LARC or the wrapped optimizer.
        """
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replacement = pre_hook(self, loaded)
            if replacement is not None:
                loaded = replacement
        self.optim.load_state_dict(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Scales all gradients in place, then calls the wrapped optimizer's step.

        Args:
            closure (Callable | None, default None): Called first, with gradients enabled.

        Returns:
            The closure's result, or None without a closure.

        Raises:
            RuntimeError: If a gradient is sparse or complex. The message contains the indices of
                the parameter and the group. Nothing has changed.
        """
        if isinstance(self.optim, FusedOptimizer):
            self.optim._raise_if_swapped("step")
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        layers = [_layers_of(index, group) for index, group in enumerate(self.param_groups)]
        with _without_weight_decay(self.param_groups) as weight_decays:
            for group, weight_decay, of_group in zip(
                self.param_groups, weight_decays, layers, strict=True
            ):
                for (dtype, *_), (params, grads) in of_group.items():
                    self._scale(params, grads, dtype, group, weight_decay)
            self.optim.step()
        return loss

    def _scale(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        dtype: torch.dtype,
        group: dict[str, Any],
        weight_decay: float | Tensor,
    ) -> None:
        param_norms, grad_norms = _norms(params, dtype), _norms(grads, dtype)
        denominators = grad_norms + weight_decay * param_norms + self.eps
        rates = self.trust_coefficient * param_norms / denominators
        if self.clip:
            rates = (rates / group["lr"]).clamp(max=1.0)
        adapts = (param_norms != 0) & (grad_norms != 0)
        rates = torch.where(adapts, rates, 1.0)
        # With `maximize`, torch negates the gradient but not the weight decay.
        decays = adapts.to(dtype) * (-weight_decay if group.get("maximize") else weight_decay)
        decays_at_all = isinstance(weight_decay, Tensor) or weight_decay != 0
        for param, grad, rate, decay in zip(
            params, grads, rates.unbind(), decays.unbind(), strict=True
        ):
            exact = grad.to(dtype)
            if decays_at_all:
                exact.addcmul_(param, decay)
            exact.mul_(rate)
            if exact is not grad:
                grad.copy_(exact)


def _check_number(name: str, value: Any, *, above_zero: bool) -> None:
    bound = "above 0" if above_zero else "at least 0"
    where = f"LARC: expected {name} to be a number, finite and {bound}"
    if not isinstance(value, Real):
        raise TypeError(f"{where}, got {type(value).__name__}.")
    if not math.isfinite(value) or value < 0.0 or (above_zero and value == 0.0):
        raise ValueError(f"{where}, got {value}.")


def _layers_of(index: int, group: dict[str, Any]) -> _Layers:
    """Returns the group's parameters and gradients, by computation dtype, device and mesh."""
    layers: _Layers = {}
    for position, param in enumerate(group["params"]):
        grad = param.grad
        if grad is None:
            continue
        where = f"LARC.step: expected the gradient of params[{position}] of group {index} to be"
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{where} dense, got layout {grad.layout}. "
                "Use a separate optimizer without LARC for that parameter."
            )
        if not grad.is_floating_point():
            raise RuntimeError(f"{where} real, got {grad.dtype}.")
        dtype = torch.promote_types(torch.promote_types(param.dtype, grad.dtype), torch.float32)
        key = (dtype, grad.device, getattr(grad, "device_mesh", None))
        params, grads = layers.setdefault(key, ([], []))
        params.append(param)
        grads.append(grad)
    return layers


@contextlib.contextmanager
def _without_weight_decay(groups: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Sets the groups' weight decay to 0 within the context; yields the original values."""
    weight_decays = [group.get("weight_decay", 0.0) for group in groups]
    try:
        for group in groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
        yield weight_decays
    finally:
        for group, weight_decay in zip(groups, weight_decays, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = weight_decay
