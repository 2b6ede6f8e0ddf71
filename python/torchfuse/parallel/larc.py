# SPDX-License-Identifier: BSD-3-Clause
"""Layer-wise adaptive rates (You, Gitman and Ginsburg 2017) around any optimizer."""

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

# Parameters and gradients of one group, by the dtype to compute in, device and mesh of DTensors.
_Layers = dict[tuple[torch.dtype, torch.device, Any], tuple[list[Tensor], list[Tensor]]]


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Norms in `dtype`, which is named only where it differs: not every torch shards it."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return torch.stack(torch._foreach_norm(tensors))
    return torch.stack(torch._foreach_norm(tensors, dtype=dtype))


class LARC(torch.optim.Optimizer):
    r"""Gives every parameter a learning rate of its own, from its norm and that of its gradient.

    Before the step of the optimizer inside, each gradient :math:`g` of a parameter :math:`p` is
    replaced, in place, by

    .. math::
        \eta &= \tau \frac{\lVert p \rVert}{\lVert g \rVert + \lambda \lVert p \rVert + \epsilon} \\
        \eta &\leftarrow \min(\eta / \gamma, 1) \quad \text{(clip=True)} \\
        g &\leftarrow \eta \, (g + \lambda p)

    with the learning rate :math:`\gamma` and the weight decay :math:`\lambda` of the parameter's
    group; the optimizer inside makes its step without weight decay. So `clip=True` limits the
    learning rate to the layer's own, :math:`\min(\gamma, \eta)` (LARC), and `clip=False` scales it,
    :math:`\gamma \eta` (LARS, "Large batch training of convolutional networks", 2017). A gradient
    stays as it is if its norm or its parameter's is 0. Under `maximize` the sign before
    :math:`\lambda p` is a minus.

    This is an optimizer like any other: schedulers, gradient scalers and hooks take it. Its
    `param_groups`, `state` and `defaults` are those of the optimizer inside, and so are its state
    dicts, which load with and without LARC.

    Args:
        optimizer: an optimizer whose step needs no closure.
        trust_coefficient: :math:`\tau`, above 0.
        clip: see above.
        eps: :math:`\epsilon`, at least 0.

    Attributes:
        optim: the optimizer inside.
        trust_coefficient: the argument; may be changed.
        clip: the argument; may be changed.
        eps: the argument; may be changed.

    Raises:
        TypeError: for something else than an optimizer, or one that needs a closure.
        ValueError: for a value out of range.

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
        Norms are taken in fp32 (fp64 for fp64), and a 16-bit gradient is rounded once. No step
        reads a value from the device.

        With a gradient scaler, give LARC to `scaler.step` and `scaler.unscale_`, never the
        optimizer inside: its norms are those of unscaled gradients, so the scaler has to unscale
        first. It does, because LARC does not have the attribute `_step_supports_amp_scaling`, even
        around an optimizer that has.

        Differences from apex.parallel.LARC: it is a torch.optim.Optimizer; `step` takes a closure;
        the weight decay is restored also if the step fails; nothing waits for the device; 16-bit
        norms cannot overflow; `maximize` is obeyed; sparse gradients are refused.
    """

    optim: torch.optim.Optimizer
    trust_coefficient: float
    clip: bool
    eps: float

    # They follow the optimizer inside: it replaces its list of groups when it loads a checkpoint.
    param_groups: list[dict[str, Any]] = attribute_of(
        "optim", "param_groups", "Parameter groups of the optimizer inside."
    )
    state: defaultdict[Tensor, Any] = attribute_of(
        "optim", "state", "State of the optimizer inside."
    )
    defaults: dict[str, Any] = attribute_of(
        "optim", "defaults", "Defaults of the optimizer inside."
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
                f"{type(optimizer).__name__}, which computes gradients during its step."
            )
        _check_number("trust_coefficient", trust_coefficient, above_zero=True)
        _check_number("eps", eps, above_zero=False)
        # torch's constructor would make groups and a state of its own. Its way to restore a pickled
        # optimizer makes only the rest: hooks and the wrapper around step().
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
        """Adds a parameter group to the optimizer inside."""
        self.optim.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Resets the gradients of all parameters.

        Args:
            set_to_none: passed on; None: as the optimizer inside does by itself.
        """
        if set_to_none is None:
            self.optim.zero_grad()
        else:
            self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer inside; the arguments of LARC are not in it."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict: dict[str, Any] = self.optim.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replacement = post_hook(self, state_dict)
            if replacement is not None:
                state_dict = replacement
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint into the optimizer inside.

        Args:
            state_dict: what `state_dict()` of this or of the optimizer inside returned.
        """
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replacement = pre_hook(self, loaded)
            if replacement is not None:
                loaded = replacement
        self.optim.load_state_dict(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # The step.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Scales all gradients in place, then makes the step of the optimizer inside.

        Args:
            closure: called first, with gradients enabled; its value is returned.

        Raises:
            RuntimeError: for a sparse or complex gradient, naming parameter and group; nothing has
                changed.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        layers = [_layers_of(index, group) for index, group in enumerate(self.param_groups)]
        with _taken_over_weight_decay(self.param_groups) as weight_decays:
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
        # torch negates the gradient of a group that ascends, but not the decay.
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
    """What one group has to scale."""
    layers: _Layers = {}
    for position, param in enumerate(group["params"]):
        grad = param.grad
        if grad is None:
            continue
        where = f"LARC.step: expected the gradient of params[{position}] of group {index} to be"
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{where} dense, got layout {grad.layout}. "
                "Give that parameter to an optimizer without LARC."
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
def _taken_over_weight_decay(groups: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """The weight decay of each group, which is 0 in the meantime."""
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
