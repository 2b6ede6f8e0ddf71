# SPDX-License-Identifier: BSD-3-Clause
"""The state of a parameter: its tensors, how they are stored, and their initial values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchfuse import _C
from torchfuse.optimizers._checks import HALF_DTYPES, has_value
from torchfuse.optimizers._ema import EMA, EmaWeights, ema_dtype
from torchfuse.optimizers._masters import (
    MASTER,
    MASTER_DTYPES,
    REMAINDER,
    create_master,
    drop_master,
    master_of,
)
from torchfuse.optimizers._shards import local_part

#: The state names of all algorithms, by which a checkpoint of another class is known.
EVERY_STATE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_norm", "momentum_buffer", "sum")
)


@functools.cache
def _names_of(algorithm: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns all states of an algorithm, and those that are one number for the whole tensor."""
    native = _C.FusedStep(algorithm)
    return tuple(native.state_names), tuple(native.tensor_state_names)


class StateCreation(EmaWeights):
    """Creation of parameter states, for all optimizers."""

    #: Name of the native algorithm.
    _algorithm: ClassVar[str]

    #: States with a dtype option of their own, and its name; all others follow `state_dtype`.
    _dtype_options: ClassVar[Mapping[str, str]] = {}

    # What a subclass may override.

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the states that a parameter of this group needs."""
        return self._all_state_names()

    def _begin_state(self, param: Tensor, group: dict[str, Any], name: str) -> Tensor:
        """Returns the initial value of the state `name` of a parameter."""
        return self._empty_state(name, param, group).zero_()

    # Common to all optimizers.

    @torch.no_grad()
    def remake_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Updates fp32 masters after writes to 16-bit parameters that a step cannot detect.

        Master elements that do not round to the parameter's element are replaced with it; all
        others keep their bits. A remainder is cleared where it extends no parameter: a negative
        one beside 0, a positive one beside an infinity. Steps do this automatically for writes that
        change the parameter's version, such as `p.clamp_()` under no_grad or
        `model.load_state_dict()`. Writes through `p.data` and by a replayed CUDA graph do not
        change it: call this method after them.

        Args:
            params: parameters of this optimizer. None: all.

        Raises:
            ValueError: for a tensor that is not a parameter of this optimizer.

        Example:
            >>> import torch, torchfuse
            >>> p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            >>> opt = torchfuse.optimizers.FusedAdam([p], master_weights=True)
            >>> p.grad = torch.zeros_like(p)
            >>> opt.step()
            >>> p.data.fill_(3)
            tensor([3., 3.], dtype=torch.bfloat16)
            >>> opt.remake_masters([p])
            >>> opt.state[p]["master_param"]
            tensor([3., 3.])
        """
        self._refuse_swapped("remake_masters")
        known = {id(param): param for group in self.param_groups for param in group["params"]}
        wanted = list(known.values()) if params is None else list(params)
        for index, param in enumerate(wanted):
            if id(param) not in known:
                raise ValueError(
                    f"{type(self).__name__}.remake_masters: expected params[{index}] to be a "
                    f"parameter of the optimizer, got another tensor of shape {list(param.shape)}."
                )
        with self._lock.between_steps:
            for param in wanted:
                state = self.state.get(param, {})
                if param.dtype not in HALF_DTYPES:
                    self._take_master(param)
                for master in map(state.get, MASTER_DTYPES):
                    if master is not None:
                        _C.remake_master(local_part(param.detach()), local_part(master))

    def _takes_part(self, param: Tensor) -> bool:
        """Whether a step needs a state of the parameter."""
        return param.grad is not None or bool(self.state.get(param))

    def _refuse_capture(self, param: Tensor, group: dict[str, Any]) -> None:
        """Raises if a CUDA graph's capture would create state, which each replay would reset."""
        if not param.is_cuda or not torch.cuda.is_current_stream_capturing():
            return
        state = self.state.get(param, {})
        averages = () if group["ema_decay"] is None else (EMA,)
        if any(state.get(name) is None for name in (*self._state_names(group), *averages, "step")):
            raise RuntimeError(
                f"{type(self).__name__}.step: expected a step before the one that a CUDA graph "
                "captures, got a capture of the first. Take a step, or several, outside of the "
                "capture."
            )

    def _create_state(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        for name in self._state_names(group):
            if state.get(name) is None:
                state[name] = self._begin_state(param, group, name)
        if group.get("stochastic_rounding"):
            drop_master(state)
        elif param.dtype not in HALF_DTYPES:
            self._take_master(param)
        elif group["master_weights"]:
            remainders = bool(group.get("store_param_remainders"))
            create_master(param, state, remainders and param.dtype == torch.bfloat16)
        if group["ema_decay"] is not None and state.get(EMA) is None:
            state[EMA] = self._begin_ema(param, group)

    def _take_master(self, param: Tensor) -> None:
        """Gives a parameter that was converted, as by model.float(), the value of its master."""
        state = self.state.get(param, {})
        for master in map(state.get, MASTER_DTYPES):
            if master is not None:
                _C.take_master(local_part(param.detach()), local_part(master))
        drop_master(state)

    def _begin_ema(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns the average before its first step: a copy of the master or the parameter."""
        value = local_part(param.detach())
        masters = {
            name: local_part(tensor)
            for name, tensor in self.state[param].items()
            if name in MASTER_DTYPES
        }
        if MASTER in masters and has_value(param):
            # It may be older than the parameter, which the step would find out too late.
            _C.remake_master(value, masters[MASTER])
        master = master_of(value, masters)
        ema = self._empty_state(EMA, param, group)
        local_part(ema).copy_(value if master is None else master)
        return ema

    def _step_on_fakes(self) -> bool:
        """Performs the step if the parameters are fake tensors, and returns whether they are.

        Memory estimators run a whole training step under FakeTensorMode and count the tensors that
        remain. So missing states are created, and nothing is computed.
        """
        for group in self.param_groups:
            if group["params"]:
                first = group["params"][0]
                if type(first) is torch.nn.Parameter or not is_fake(first):
                    return False
                self._create_fake_states()
                return True
        return False

    @torch.no_grad()
    def _create_fake_states(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._create_state(param, group)
                    count = local_part(param).new_zeros((), dtype=torch.float32)
                    self.state[param].setdefault("step", count)

    def _needed_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the states and the storage of parameters for which a plan is made."""
        names = self._state_names(group)
        if group["ema_decay"] is not None:
            names = (*names, EMA)
        if group.get("stochastic_rounding"):
            return (*names, "stochastic_rounding")
        if not group["master_weights"]:
            return names
        return (*names, REMAINDER if group.get("store_param_remainders") else MASTER)

    def _all_state_names(self) -> tuple[str, ...]:
        """Returns all states of the algorithm, needed or not."""
        return _names_of(self._algorithm)[0]

    def _is_tensor_state(self, name: str) -> bool:
        """Whether the state `name` is one number for the whole tensor."""
        return name in _names_of(self._algorithm)[1]

    def _empty_state(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Allocates a state or a master: laid out like the parameter, or one number for all."""
        if self._is_tensor_state(name):
            wide = param.dtype == torch.float64
            dtype = torch.float64 if wide else torch.float32
            return torch.empty((), dtype=dtype, device=param.device)
        if name == EMA:
            dtype = ema_dtype(param)
        else:
            dtype = MASTER_DTYPES.get(name) or self._state_dtype(param, group, name)
        return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def _state_dtype(self, param: Tensor, group: dict[str, Any], name: str) -> torch.dtype:
        own = group.get(self._dtype_options.get(name, "state_dtype"))
        dtype: torch.dtype | None = group["state_dtype"] if own is None else own
        if dtype is not None:
            return dtype
        return torch.float32 if param.dtype in HALF_DTYPES else param.dtype

    def _state_dtype_options(self) -> tuple[str, ...]:
        return ("state_dtype", *dict.fromkeys(self._dtype_options.values()))

    def _storage_options(self) -> tuple[str, ...]:
        """Returns the options that determine how state is stored, not what is computed."""
        return (*self._state_dtype_options(), "store_param_remainders", "stochastic_rounding")
