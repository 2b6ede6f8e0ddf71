# SPDX-License-Identifier: BSD-3-Clause
"""Models after amp.initialize: casts of what goes in and out, and copies of all kinds."""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from support.amp import LEVELS, make_model
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from torchfuse.parallel import SyncBatchNorm

DATA = torch.ones(2, 6)


class Echo(nn.Module):
    """Returns its arguments, and notes them."""

    seen: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args: Any, flag: bool = False, **kwargs: Any) -> Any:
        """What Echo does."""
        Echo.seen = (args, kwargs)
        if kwargs:
            return kwargs
        return args[0] if len(args) == 1 else args


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    name: str = "x"


class Movable:
    """Has a method `to`, as batches of many programs have."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def to(self, dtype: torch.dtype) -> Movable:
        return Movable(self.value.to(dtype))


class Output(collections.OrderedDict):
    extra = 3


# Inputs and outputs.

FLOATS, INTS = torch.ones(2), torch.ones(2, dtype=torch.int64)
CONTAINERS = [
    FLOATS,
    [FLOATS, INTS],
    (FLOATS, [INTS, "text", None]),
    {"a": FLOATS, "b": {"c": INTS, "d": FLOATS}},
    Pair(FLOATS, INTS),
    Output(a=FLOATS),
    collections.defaultdict(list, a=FLOATS),
    Frozen(FLOATS),
    pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]),
]


def dtypes_in(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.dtype]
    if dataclasses.is_dataclass(value):
        return [type(value), *dtypes_in(getattr(value, "value"))]  # noqa: B009 (any dataclass)
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, str) or value is None:
        return [value]
    return [type(value), *(found for item in items for found in dtypes_in(item))]


def with_half(found: list[Any]) -> list[Any]:
    return [torch.float16 if entry == torch.float32 else entry for entry in found]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_inputs_become_fp16_and_outputs_fp32(amp: Any, level: str, value: Any) -> None:
    model = amp.initialize(Echo(), opt_level=level, verbosity=0)
    before = dtypes_in(value)
    output = model(value)
    (given,), _ = Echo.seen
    assert dtypes_in(given) == with_half(before)
    assert dtypes_in(output) == dtypes_in(value) == before
    model(key=value)
    assert dtypes_in(Echo.seen[1]["key"]) == with_half(before)


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_o1_widens_outputs_only(amp: Any, value: Any) -> None:
    model = amp.initialize(Echo(), opt_level="O1", verbosity=0)
    assert model(value) is value  # nothing to cast, nothing copied
    assert Echo.seen[0][0] is value
    double = FLOATS.double()
    assert model(double) is double
    half, short = torch.ones(2).half(), torch.ones(2).bfloat16()
    output = model([half, {"a": short}])
    assert dtypes_in(output) == [list, torch.float32, dict, torch.float32]


def test_details_of_containers(amp: Any) -> None:
    model = amp.initialize(Echo(), opt_level="O2", verbosity=0)
    output = model(Output(a=FLOATS))
    assert output.extra == 3
    grown = model(collections.defaultdict(list, a=FLOATS))
    assert grown["new"] == []
    moved = model(Movable(FLOATS))
    assert Echo.seen[0][0].value.dtype == torch.float16
    assert moved.value.dtype == torch.float32
    packed = pack_sequence([torch.ones(3, 2)])
    result = model(packed)
    assert isinstance(result, PackedSequence)
    assert torch.equal(result.batch_sizes, packed.batch_sizes)
    other = nn.Linear(1, 1)
    assert model(other) is other
    assert other.weight.dtype == torch.float32
    assert model(FLOATS.double()).dtype == torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_the_dtype_of_outputs_can_be_chosen(amp: Any, level: str) -> None:
    options = {"opt_level": level, "verbosity": 0}
    model = amp.initialize(make_model(), cast_model_outputs=torch.float16, **options)
    assert model(DATA).dtype == torch.float16
    plain = amp.initialize(make_model(), **options)
    assert torch.equal(plain(DATA.half()), plain(DATA))  # inputs are cast to what it computes in


# Batch normalization.


@pytest.mark.parametrize(
    ("keep", "kept"), [(None, True), ("True", True), ("False", False), (False, False)]
)
def test_batch_normalization_in_fp32(amp: Any, keep: Any, kept: bool) -> None:
    layers = [
        nn.BatchNorm1d(6),
        SyncBatchNorm(6),
        nn.BatchNorm1d(6, affine=False),
        nn.LayerNorm(6),
    ]
    model = amp.initialize(
        nn.Sequential(*layers), opt_level="O2", keep_batchnorm_fp32=keep, verbosity=0
    )
    norm = torch.float32 if kept else torch.float16
    assert model[0].weight.dtype == model[1].bias.dtype == model[0].running_var.dtype == norm
    assert model[2].running_var.dtype == model[3].weight.dtype == torch.float16
    assert model[0].num_batches_tracked.dtype == torch.int64
    assert (model[:1](DATA.half()).dtype, model(DATA).dtype) == (torch.float16, torch.float32)


def test_tied_parameters_stay_tied(amp: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.LSTM(6, 6))
    model[1].weight = model[0].weight
    kept = model[0].weight
    model[0].weight.grad = torch.ones(6, 6)
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model[1].weight is model[0].weight is kept
    assert (kept.dtype, kept.grad.dtype) == (torch.float16, torch.float16)
    assert {weight.dtype for weight in model[2].all_weights[0]} == {torch.float16}


# The model stays what it was.


@pytest.mark.parametrize("level", LEVELS)
def test_the_model_stays_an_instance_of_its_class(amp: Any, level: str) -> None:
    model = Echo()
    assert amp.initialize(model, opt_level=level, verbosity=0) is model
    assert isinstance(model, Echo)
    kind = type(model)
    assert (kind.__name__, kind.__module__) == (Echo.__name__, Echo.__module__)
    assert (kind.__qualname__, kind.__doc__) == (Echo.__qualname__, Echo.__doc__)
    assert inspect.signature(model.forward) == inspect.signature(Echo().forward)
    assert model.forward.__doc__ == "What Echo does."
    assert set(model.state_dict()) == {"weight"}
    assert repr(model) == repr(Echo())
    # Others of the class have no casts.
    assert Echo()(FLOATS.half()).dtype == torch.float16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_is_a_model_of_its_own(amp: Any, level: str, copied: Any) -> None:
    model = amp.initialize(make_model(), opt_level=level, verbosity=0).eval()
    expected = model(DATA)
    copy_of_it = copied(model)
    assert type(copy_of_it) is type(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert torch.equal(copy_of_it(DATA), expected)
    assert not torch.equal(model(DATA), expected)
    dtypes = {value.dtype for value in copy_of_it.state_dict().values()}
    assert dtypes == {torch.float32, torch.int64}


@pytest.mark.parametrize("level", LEVELS)
def test_replicas_of_data_parallel_run_their_own_parameters(amp: Any, level: str) -> None:
    model = amp.initialize(make_model(), opt_level=level, verbosity=0).eval()
    replica = model._replicate_for_data_parallel()
    replica._modules["3"] = copy.deepcopy(model[3])
    expected = model(DATA)
    with torch.no_grad():
        model[3].bias.fill_(9.0)
    assert torch.equal(replica(DATA), expected)
    assert replica(DATA).dtype == torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_a_forward_pass_of_the_instance_is_kept(amp: Any, level: str) -> None:
    model = make_model().eval()
    inside = model.forward
    model.forward = lambda data: inside(data) + 1.0
    amp.initialize(model, opt_level=level, verbosity=0)
    plain = amp.initialize(make_model(), opt_level=level, verbosity=0).eval()
    # It may be called by its name.
    assert torch.equal(plain.forward(DATA), plain(DATA))
    torch.testing.assert_close(model(DATA), plain(DATA) + 1.0, atol=2e-3, rtol=0)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_torch_compile(amp: Any, level: str, before: bool) -> None:
    plain = amp.initialize(make_model(), opt_level=level, verbosity=0).eval()
    model: Any = make_model().eval()
    model = torch.compile(model, backend="eager") if before else model
    amp.initialize(model, opt_level=level, verbosity=0)
    model = model if before else torch.compile(model, backend="eager")
    assert torch.equal(model(DATA), plain(DATA))
    assert model(DATA).dtype == torch.float32
