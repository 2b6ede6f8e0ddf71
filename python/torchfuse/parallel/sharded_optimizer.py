# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose states, and gradients if asked, are split over processes (ZeRO stages 1, 2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse import _C
from torchfuse._delegation import attribute_of
from torchfuse.optimizers._base import FusedOptimizer
from torchfuse.parallel._gather import Gathers, finish_gathers_of
from torchfuse.parallel._gather_units import GatherUnits
from torchfuse.parallel._partition import Partition, move_into
from torchfuse.parallel._ranks import device_of_group
from torchfuse.parallel._scattered_gradients import (
    GradientOptions,
    ScatteredGradients,
    SplitGradients,
)
from torchfuse.parallel._sharded_checks import (
    NAME,
    check_agreement,
    check_class,
    check_options,
    check_params,
    check_standings,
    checked_group,
)

_LENT = ("grad_scale", "found_inf", "_check_inside", "_found_inf_is_output", "_scale_is_shared")


class ShardedOptimizer(SplitGradients):
    r"""Splits the states and the step of a fused optimizer over the processes of a group.

    This is stage 1 of ZeRO (Rajbhandari et al. 2020): all processes have all parameters, and
    gradients that data parallelism made equal. Of :math:`N` processes each keeps the states of an
    :math:`N`-th of the elements, updates these, and receives the other elements in the dtype of the
    model. What is computed for an element is what the optimizer would compute alone: bit for bit,
    except that norms over all elements (clipping, LAMB, LARS, NovoGrad) are sums over the
    processes.

    With `shard_gradients=True` it is stage 2: while backward runs, each bucket of gradients is
    reduced to averages of which every process keeps its part, and is freed. Use the model itself
    then, not in a DistributedDataParallel; its buffers are not broadcast, and gradients of
    parameters that this optimizer does not have stay those of the process. The model's parameters
    have no `.grad` after a backward pass, the parameters of `optim` have those of the parts. Each
    backward pass adds to them until `step()` uses them up or `zero_grad()` of this object resets
    them. Clip by `max_grad_norm`, and scale losses by :class:`torchfuse.amp.GradScaler`: others
    look for gradients in the model, and torch's scaler is refused.

    It is a fused optimizer itself: schedulers, :class:`torchfuse.amp.GradScaler` and hooks accept
    it, and its `param_groups` have the parameters of the model and the options of the step.

    Args:
        params: parameters or groups of them, of the same shapes on all ranks. All ranks get the
            values of rank 0. They become views of flat memory and have to stay there: move and
            convert the model before.
        optimizer_class: a class of :mod:`torchfuse.optimizers`.
        process_group: processes that the states are split over. None: the default group.
        shard_gradients: split gradients too. On all ranks, each backward pass must reach every
            parameter that required gradients at construction, once.
        bucket_cap_mb: size in MiB at which a bucket of gradients is reduced; the first has at most
            1 MiB. Parameters are taken in reverse order. Where backward reaches them so, a process
            has at most three buckets in memory, beside its parts.
        find_unused_parameters: with `shard_gradients`, accept parameters that a backward pass does
            not reach, at the cost of one more small collective. A part that no rank used keeps the
            gradient that it had, or none. Where ranks use different ones, backward must not wait
            for other ranks itself, as that of SyncBatchNorm does: each may wait for the other.
        gather_in_forward: modules that wait for their own parameters, so that these arrive while
            earlier ones compute; in the order in which they run. What nobody waits for arrives
            within the step, as for a module that has not run since the last one. Only the forward
            pass of a module, and of those inside of it, and its state dict may use its parameters
            until then: call :meth:`finish_gather` before anything else does, such as a copy of the
            model. A gather that failed fails again, but in loading the model. Run compiled modules
            after construction first. None: all arrive in the step.
        **options: the arguments of `optimizer_class`.

    Attributes:
        optim: the optimizer of this process's part. Its parameters are views of the part.
        process_group: the group.

    Raises:
        TypeError: if `optimizer_class` is none of torchfuse, for its arguments, and for parameters
            that are DTensors.
        ValueError: as `optimizer_class`; for `write_back_grads`, and
            parameters that share memory or are tensors of inference mode; for a `bucket_cap_mb`
            that is not positive; for options of gradients without `shard_gradients`.
        RuntimeError: without a process group; for parameters or options that differ between ranks;
            in `step()` for parameters that have left their memory, and if other parameters have
            gradients on other ranks. All ranks raise it, and nothing has been changed. With
            `shard_gradients`, `step()` also raises it for whole gradients in parameters, and
            `backward()` for a parameter that it does not reach, a sparse gradient, a rank that does
            not arrive, and after a backward pass that an exception has ended.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torchfuse.optimizers import FusedAdam
        >>> from torchfuse.parallel import ShardedOptimizer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        >>> optimizer = ShardedOptimizer(model.parameters(), FusedAdam, lr=1e-3, max_grad_norm=1.0)
        >>> model(torch.ones(5, 3)).sum().backward()
        >>> optimizer.step()
        >>> float(optimizer.grad_norm()) > 0
        True

        Gradients split too:

        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = ShardedOptimizer(model.parameters(), FusedAdam, shard_gradients=True)
        >>> with optimizer.no_sync():
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> model(torch.ones(5, 3)).sum().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
        >>> dist.destroy_process_group()

    Notes:
        `state` has the states of this process's parts. `state_dict()` and `load_state_dict()` speak
        of whole parameters, in the layout of `optimizer_class`; `state_dict()` and `swap_ema_()`
        are collectives.
    """

    _whole: FusedOptimizer

    # Properties, because loading replaces groups.
    param_groups: list[dict[str, Any]] = attribute_of(
        "_whole", "param_groups", "Groups of whole parameters, with the options of the step."
    )
    defaults: dict[str, Any] = attribute_of("_whole", "defaults", "Defaults of the options.")
    param_groups_master: Any = attribute_of("optim", "param_groups_master", "As `optim` has it.")
    _swapped: Any = attribute_of("optim", "_swapped")
    _norm_groups: Any = attribute_of("optim", "_norm_groups")

    def __init__(
        self,
        params: Any,
        optimizer_class: type[FusedOptimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        shard_gradients: bool = False,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        gather_in_forward: Sequence[nn.Module] | None = None,
        **options: Any,
    ) -> None:
        group = checked_group(process_group)
        gradients = GradientOptions(shard_gradients, bucket_cap_mb, find_unused_parameters)
        check_class(optimizer_class, ShardedOptimizer)
        # The groups of this optimizer; it makes no step, and so has no state.
        whole = optimizer_class(params, **options)
        params = [param for of_group in whole.param_groups for param in of_group["params"]]
        check_params(whole, group)
        check_options(NAME, whole.param_groups)
        finish_gathers_of(params)
        self.__setstate__({"_whole": whole, "process_group": group})
        units = GatherUnits(gather_in_forward, params)
        check_agreement(group, params, whole, more=gradients.described() + units.described())
        members = gradients.members(params) if shard_gradients else units.flats(params)
        self._partition = Partition.of(params, group.rank(), group.size(), members)
        # Tensors of inference mode could not be written in later steps.
        with torch.inference_mode(False), torch.no_grad():
            flats = self._partition.zeros()
            move_into(flats, self._partition, params)
            for flat in flats:
                dist.broadcast(flat, group=group, group_src=0)
            # A view of detach() shares the count of writes, by which masters are kept up to date.
            parts = [
                self._partition.part_of(index, param.detach()) for index, param in enumerate(params)
            ]
        self._gathers = Gathers(flats, self._partition, group, units.modules, units.members, self)
        self._addresses = [param.data_ptr() for param in params]
        self._begins = [self._partition.own(index)[0] for index in range(len(params))]
        self._parts = dict(zip(params, parts, strict=True))
        self.optim = optimizer_class(
            [{**g, "params": [self._parts[p] for p in g["params"]]} for g in whole.param_groups],
            **options,
        )
        self.optim._split_over = [group.group_name] if group.size() > 1 else None
        self.optim._first_elements = self._begins
        self._steps = 0
        if shard_gradients:
            assert members is not None
            self._scattered = ScatteredGradients(
                whole.param_groups, parts, members, group, gradients
            )

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """For each parameter with states, those of this process's part of it, in one dimension."""
        of_parts = self.optim.state
        return defaultdict(
            dict, {param: of_parts[part] for param, part in self._parts.items() if part in of_parts}
        )

    def __repr__(self) -> str:
        return f"{NAME} over {self.process_group.size()} processes of {self._whole!r}"

    def make_capturable(self) -> None:
        """Converts numeric hyper-parameters of all groups to tensors, as `optimizer_class` does."""
        self._whole.make_capturable()

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raises: the parameters are split when the optimizer is made."""
        raise RuntimeError(
            f"{NAME}.add_param_group: expected all parameters at construction, got more. "
            "Make a new optimizer with all of them, and load the state of this one."
        )

    def __getstate__(self) -> NoReturn:
        """Raises: a process group can be neither copied nor pickled."""
        raise RuntimeError(
            f"{NAME}: expected no copy or pickle, got one. Save state_dict(), which has whole "
            "parameters, on all ranks at a time."
        )

    # The step.

    @torch.no_grad()
    def _update_params(self) -> None:
        self.finish_gather()
        params, scattered = list(self._parts), self._scattered
        if scattered is not None:
            scattered.check_step(getattr(self, "found_inf", None))
        parts = list(self._parts.values())
        found = _C.standings(params, parts, self._addresses, scattered is not None)
        if self._compares_step():
            check_agreement(self.process_group, params, self._whole, found)
        check_standings(found)
        check_options(f"{NAME}.step", self.param_groups)
        self._pass_options_on()
        self._step_of_part()
        self._gathers.run()
        self._steps += 1
        if scattered is not None:
            scattered.drop()

    def _compares_step(self) -> bool:
        """Where a GPU would have to be waited for, ranks are compared in the first step only."""
        return self._steps == 0 or device_of_group(self.process_group).type == "cpu"

    def _step_of_part(self) -> None:
        parts = list(self._parts.values())
        lent = {name: getattr(self, name) for name in _LENT if hasattr(self, name)}
        for name, value in lent.items():
            setattr(self.optim, name, value)
        try:
            if self._scattered is None:
                _C.take_gradients(list(self._parts), parts, self._begins)
            self.optim._fused_update()
            self._found_inf_is_output = False
        finally:
            for name in lent:
                vars(self.optim).pop(name, None)
            if self._scattered is None:
                _C.reset_gradients(parts)

    def finish_gather(self) -> None:
        """Waits for what modules of `gather_in_forward` have not waited for; no collective."""
        self._gathers.finish()

    # What the last step did, masters and averages.

    def grad_norm(self) -> Tensor | None:
        """Returns the norm of the whole gradients, as the optimizer of the part does."""
        return self.optim.grad_norm()

    def last_step_skipped(self) -> Tensor | None:
        """Returns 1 if the last step was skipped, else 0; None before the first step."""
        return self.optim.last_step_skipped()

    def remake_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Updates this process's masters after writes to parameters that a step cannot detect.

        Args:
            params: parameters of the model. None: all.
        """
        wanted = list(self._parts) if params is None else list(params)
        unknown = [index for index, param in enumerate(wanted) if param not in self._parts]
        if unknown:
            raise ValueError(
                f"{NAME}.remake_masters: expected params[{unknown[0]}] to be a parameter of the "
                "optimizer, got another tensor."
            )
        self.optim.remake_masters([self._parts[param] for param in wanted])

    def swap_ema_(self) -> None:
        """Exchanges the parameters and their averages on all processes; a collective."""
        self.finish_gather()
        self.optim.swap_ema_()
        self._gathers.run()
        self.finish_gather()
