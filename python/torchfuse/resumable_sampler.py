# SPDX-License-Identifier: BSD-3-Clause
"""A sampler that can resume in the middle of an epoch."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import Sampler, SequentialSampler

from torchfuse._shown import shown


class ResumableSampler(Sampler[Any]):
    """Wraps a torch sampler so that a checkpoint contains the position in the epoch.

    Data loaders prefetch samples, so the sampler cannot count the samples that were used for
    training. The program counts instead:

    - Call `set_epoch` when an epoch begins.
    - Call `advance` with the batch size after each batch.

    After loading, the next iteration skips the counted samples. The order of the remaining samples
    and of later epochs is unchanged. Once samples were counted, another iteration raises until
    `set_epoch` is called; the same epoch continues with the remaining samples.

    Args:
        sampler (torch.utils.data.Sampler): Sampler with a reproducible order: a sampler with
            ``set_epoch``, such as ``DistributedSampler``; a sampler with its own ``generator``,
            such as ``RandomSampler`` or ``SubsetRandomSampler``; or ``SequentialSampler``.

    Raises:
        ValueError: If the order is not reproducible, because the sampler draws from torch's default
            generator, or if `sampler` is a BatchSampler.

    Example:
        >>> import torch
        >>> from torch.utils.data import RandomSampler
        >>> from torchfuse import ResumableSampler
        >>> def make():
        ...     return ResumableSampler(RandomSampler(range(6), generator=torch.Generator()))
        >>> sampler = make()
        >>> order = list(sampler)
        >>> sampler.advance(4)
        >>> resumed = make()
        >>> resumed.load_state_dict(sampler.state_dict())
        >>> list(resumed) == order[4:]
        True
    """

    def __init__(self, sampler: Sampler[Any]) -> None:
        self._sampler: Any = sampler
        self._epoch = 0
        self._position = 0
        self._begin: torch.Tensor | None = None  # generator state at the epoch's beginning
        self._needs_epoch = False  # whether samples were counted since set_epoch()
        self._has_epochs = hasattr(sampler, "set_epoch")
        if self._has_epochs or type(sampler) is SequentialSampler:
            return
        generator = getattr(sampler, "generator", "no such attribute")
        if not isinstance(generator, torch.Generator):
            raise ValueError(
                f"ResumableSampler: expected {type(sampler).__name__} to have its own generator, "
                f"whose state can be saved, got {generator}. Pass a sampler such as "
                "RandomSampler(dataset, generator=torch.Generator()), or a sampler with "
                "set_epoch(). For a BatchSampler, wrap the inner sampler."
            )

    @property
    def _generator(self) -> torch.Generator | None:
        generator = getattr(self._sampler, "generator", None)
        return None if self._has_epochs else cast("torch.Generator | None", generator)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; if `epoch` is the current epoch, continues after the counted samples.

        Args:
            epoch (int): Number of the epoch, from 0.
        """
        self._needs_epoch = False
        if epoch != self._epoch:
            self._epoch, self._position, self._begin = epoch, 0, None

    def advance(self, samples: int) -> None:
        """Counts samples that this process has trained on.

        Args:
            samples (int): Number of samples, usually the batch size.

        Raises:
            TypeError: If `samples` is not an int.
            ValueError: If `samples` exceeds the number of samples left in the epoch.
        """
        try:
            samples = operator.index(samples)
        except TypeError:
            raise TypeError(
                f"ResumableSampler: expected samples to be an int, got {samples!r}. Pass the batch "
                "size."
            ) from None
        if not 0 <= samples <= len(self._sampler) - self._position:
            raise ValueError(
                f"ResumableSampler: expected samples to be from 0 to the "
                f"{len(self._sampler) - self._position} that are left in the epoch, got {samples}."
            )
        self._position += samples
        self._needs_epoch = self._needs_epoch or samples > 0

    def __iter__(self) -> Iterator[Any]:
        if self._needs_epoch:
            raise RuntimeError(
                f"ResumableSampler was iterated again after {self._position} samples of epoch "
                f"{self._epoch} were counted. Call set_epoch(epoch) before each iteration."
            )
        self._needs_epoch = self._position > 0 and len(self) == 0
        if self._has_epochs:
            self._sampler.set_epoch(self._epoch)
        if self._generator is not None:
            if self._begin is None:
                self._begin = self._generator.get_state()
            else:
                self._generator.set_state(self._begin)
        return islice(iter(self._sampler), self._position, None)

    def __len__(self) -> int:
        """Returns the number of samples left in the epoch."""
        return len(cast(Sized, self._sampler)) - self._position

    def state_dict(self) -> dict[str, Any]:
        """Returns ``epoch``, ``position`` and, for a sampler with a generator, ``generator``."""
        state: dict[str, Any] = {"epoch": self._epoch, "position": self._position}
        if self._generator is not None:
            begin = self._generator.get_state() if self._begin is None else self._begin
            state["generator"] = begin
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict from `state_dict()`.

        Args:
            state_dict (Mapping[str, Any]): State to load.

        Raises:
            ValueError: If a key is missing, a value has the wrong type, or the position is beyond
                the epoch's end. Nothing changes.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"ResumableSampler: expected the state to be a dict, got "
                f"{type(state_dict).__name__}."
            )
        keys = ["epoch", "position", *(["generator"] if self._generator is not None else [])]
        for key in keys:
            if key not in state_dict:
                raise ValueError(
                    f"ResumableSampler: expected the state to hold {key!r}, got "
                    f"{shown(sorted(map(str, state_dict)))}."
                )
        if self._generator is None and state_dict.get("generator") is not None:
            raise ValueError(
                "ResumableSampler: expected the state of a sampler without a generator, such as "
                f"{type(self._sampler).__name__}, got a state with a generator. Wrap the same kind "
                "of sampler that was saved."
            )
        epoch, position = state_dict["epoch"], state_dict["position"]
        for name, value in (("epoch", epoch), ("position", position)):
            if type(value) is not int:
                raise ValueError(
                    f"ResumableSampler: expected {name} to be a whole number, got {shown(value)}."
                )
        if not 0 <= position <= len(self._sampler):
            raise ValueError(
                f"ResumableSampler: expected position to be from 0 to {len(self._sampler)}, got "
                f"{position}. Use the data set and the number of processes of the saved run."
            )
        begin = state_dict.get("generator")
        if self._generator is not None:
            self._load_generator(self._generator, begin, position)
        self._epoch, self._position, self._begin = epoch, position, begin
        self._needs_epoch = 0 < position == len(self._sampler)

    def keep(self) -> Callable[[], None]:
        """Returns a function that restores the sampler and its generator to the current state."""
        own = dict(vars(self))
        generator = self._generator
        state = None if generator is None else generator.get_state()

        def restore() -> None:
            vars(self).update(own)
            if generator is not None and state is not None:
                generator.set_state(state)

        return restore

    def _load_generator(self, generator: torch.Generator, begin: Any, position: int) -> None:
        """Sets the generator to its state at the next epoch's beginning.

        `begin` is the state at the current epoch's beginning, which __iter__() sets again.
        """
        try:
            torch.Generator(generator.device).set_state(begin)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"ResumableSampler: expected generator to be a generator's state, got: {error}"
            ) from error
        generator.set_state(begin)
        if position > 0:
            deque(self._sampler, maxlen=0)
