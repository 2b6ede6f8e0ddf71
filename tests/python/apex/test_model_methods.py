# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose groups hold masters: every method leaves model and masters in agreement."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.amp import backward, make_model
from support.compare import assert_all_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torchfuse.apex._model_methods import refuse_tied
from torchfuse.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer
from torchfuse.optimizers import FusedAdam, FusedSGD
from torchfuse.parallel import LARC


class Run:
    """A model in fp16 with masters in the groups of `inner`, after three steps."""

    def __init__(self, name: str, amp: Any) -> None:
        """`amp`: the module, for level O2; None: an FP16_Optimizer."""
        model = make_model()
        inner = MAKERS[name](model.parameters())
        self._amp = amp
        if amp is None:
            self.model, self.outer = model.half(), FP16_Optimizer(inner, verbose=False)
        else:
            self.model, self.outer = amp.initialize(model, inner, opt_level="O2", verbosity=0)
        self.inner = inner
        for step in range(3):
            self.train(step)

    def train(self, seed: int) -> None:
        self.backward(seed)
        self.outer.step()
        self.outer.zero_grad()

    def backward(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.float32 if self._amp is not None else torch.float16
        loss = self.model(torch.randn(8, 6, generator=generator).to(dtype)).float().square().mean()
        if self._amp is None:
            self.outer.backward(loss)
        else:
            backward(self._amp, loss, self.outer)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The model's parameters, and what is in the groups for them."""
        owned = [param for group in self.inner.param_groups for param in group["params"]]
        return list(zip(self.model.parameters(), owned, strict=False))

    def in_agreement(self) -> bool:
        return all(torch.equal(param, owned.to(param.dtype)) for param, owned in self.pairs())

    def tensors(self) -> dict[str, Tensor]:
        named = {}
        for index, (param, owned) in enumerate(self.pairs()):
            named[f"param {index}"] = param.detach().clone()
            named[f"master {index}"] = owned.detach().clone()
            named[f"average {index}"] = self.inner.state[owned]["ema_param"].clone()
        return named


MAKERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda params: FusedAdam(params, lr=1e-2, ema_decay=0.5),
    "sgd": lambda params: FusedSGD(params, lr=1e-2, ema_decay=0.5),
    "larc": lambda params: LARC(FusedSGD(params, lr=1e-2, ema_decay=0.5)),
}


@pytest.fixture(params=["O2", "FP16_Optimizer"])
def start(request: pytest.FixtureRequest, amp: Any) -> Callable[..., Run]:
    """Makes a run of each kind."""
    return lambda name="adam": Run(name, amp if request.param == "O2" else None)


@pytest.mark.parametrize("name", MAKERS)
def test_averages_reach_the_model_and_leave_it_as_it_was(name: str, start: Any) -> None:
    run = start(name)
    before = run.tensors()
    with run.inner.ema_weights():
        for index, (param, _owned) in enumerate(run.pairs()):
            average = before[f"average {index}"]
            assert torch.equal(param, average.to(param.dtype))
            assert not torch.equal(average, before[f"master {index}"])
    assert_all_same_bits(run.tensors(), before)


def test_averages_follow_what_was_written_to_the_model(start: Any) -> None:
    run = start()
    with torch.no_grad():
        run.model[0].weight.fill_(2.0)
    run.inner.swap_ema_()
    run.inner.swap_ema_()
    assert bool((run.model[0].weight == 2.0).all())
    assert run.in_agreement()
    run.inner.swap_ema_()
    with torch.no_grad():
        run.model[0].weight.fill_(3.0)
    with pytest.warns(UserWarning, match="parameters were written while they held their averages"):
        run.inner.swap_ema_()
    assert bool((run.inner.state[run.pairs()[0][1]]["ema_param"] == 3.0).all())


def test_masters_are_not_remade_of_averages(start: Any) -> None:
    run = start()
    with (
        run.inner.ema_weights(),
        pytest.raises(RuntimeError, match=r"remake_masters: expected the parameters to hold their"),
    ):
        run.inner.remake_masters()


def test_masters_follow_some_parameters(start: Any) -> None:
    run = start("larc")
    inside = run.inner.optim
    for layer in (run.model[0], run.model[3]):
        layer.weight.data.fill_(0.5)
    inside.remake_masters([run.model[3].weight])
    halves = [bool((owned == 0.5).all()) for _, owned in run.pairs()]
    assert halves == [False, False, False, False, True, False]
    inside.remake_masters()
    assert run.in_agreement()
    message = r"FusedSGD\.remake_masters: expected params\[0\] to be a"
    with pytest.raises(ValueError, match=message):
        inside.remake_masters([torch.ones(3)])


def test_remaking_some_masters_in_amp_follows_other_writes(amp: Any) -> None:
    run = Run("adam", amp)
    with torch.no_grad():
        for layer in (run.model[0], run.model[3]):
            layer.weight.fill_(0.5)
    run.inner.remake_masters([run.model[3].weight])
    assert run.in_agreement()


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_weights_that_overlap_are_refused(start: Any, offset: int) -> None:
    """The masters do not share memory, so that the step itself would see nothing."""
    run = start("sgd")
    run.model[0].bias.data = run.model[3].bias.data.repeat(3)[:8]
    run.train(5)
    memory = torch.zeros(run.model[0].bias.numel() + offset, dtype=torch.float16)
    run.model[0].bias.data = memory[: run.model[0].bias.numel()]
    run.model[3].bias.data = memory[offset : offset + run.model[3].bias.numel()]
    run.backward(6)
    with pytest.raises(RuntimeError, match=r"step: expected 16-bit parameter \d of the model, of"):
        run.outer.step()


def test_weights_between_each_others_elements_or_without_memory_do_not_overlap() -> None:
    halves = torch.zeros(4, 4, dtype=torch.float16).chunk(2, dim=1)
    assert refuse_tied("SGD", halves, []) == [half.data_ptr() for half in halves]
    with FakeTensorMode():  # each has the address 0, as those of memory estimators
        weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2)]
        assert refuse_tied("SGD", weights, []) == [0, 0]


@pytest.mark.parametrize("write", ["before", "after"])
def test_averages_after_a_resume_leave_clamped_weights(start: Any, write: str) -> None:
    """As of a Wasserstein GAN, whose weights are clamped after each step."""

    def clamp(run: Run) -> None:
        with torch.no_grad():
            for param in run.model.parameters():
                param.clamp_(-0.01, 0.01)

    run = start()
    if write == "before":
        clamp(run)
    saved = copy.deepcopy((run.model.state_dict(), run.outer.state_dict()))
    resumed = start()
    resumed.model.load_state_dict(saved[0])
    resumed.outer.load_state_dict(saved[1])
    if write == "after":
        clamp(resumed)
    before = [param.detach().clone() for param in resumed.model.parameters()]
    with resumed.inner.ema_weights():
        pass
    for param, expected in zip(resumed.model.parameters(), before, strict=True):
        assert torch.equal(param, expected)


def test_masters_made_in_inference_mode_can_be_written(amp: Any) -> None:
    model = make_model()
    inner = MAKERS["adam"](model.parameters())
    amp.initialize(model, inner, opt_level="O2", verbosity=0)
    with torch.inference_mode(), inner.ema_weights():
        pass
    masters = [param for group in inner.param_groups for param in group["params"]]
    assert not any(master.is_inference() for master in masters)


@pytest.mark.parametrize("refused", ["averages", "rate"])
def test_a_refused_step_leaves_the_scale(refused: str) -> None:
    run = Run("adam", None)
    run.outer.loss_scaler = DynamicLossScaler(init_scale=8.0, scale_window=1)
    run.backward(4)
    if refused == "rate":
        run.inner.param_groups[0]["lr"] = -1.0
        with pytest.raises(ValueError, match="lr"):
            run.outer.step()
    else:
        run.inner.swap_ema_()
        for run.outer.overflow in (False, True):
            with pytest.raises(RuntimeError, match=r"FusedAdam\.step: expected the parameters to"):
                run.outer.step()
    assert run.outer.loss_scale == 8.0


def test_dtensors_follow_their_masters_under_o2(amp: Any, mesh: DeviceMesh) -> None:
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = torch.nn.Linear(4, 2).bfloat16()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options: dict[str, Any] = {"verbosity": 0, "cast_model_type": torch.bfloat16}
    amp.initialize(model, optimizer, opt_level="O2", **options)
    before = model.bias.detach().full_tensor().clone()
    backward(amp, model(torch.ones(3, 4)).float().sum(), optimizer)
    optimizer.step()
    torch.testing.assert_close(model.bias.full_tensor(), before - 1.5, rtol=0, atol=0.01)


def test_a_copy_of_fp16_optimizer_reaches_its_own_model() -> None:
    run = Run("adam", None)
    before = [param.detach().clone() for param in run.model.parameters()]
    model, outer = copy.deepcopy((run.model, run.outer))
    with outer.optimizer.ema_weights():
        changed = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert all(changed)
    for param, other, old in zip(model.parameters(), run.model.parameters(), before, strict=True):
        assert torch.equal(param, old)
        assert torch.equal(other, old)
    # A copy's tensors count their writes anew.
    model, outer = copy.deepcopy((run.model, run.outer))
    with torch.no_grad():
        while model[0].weight._version < run.model[0].weight._version:
            model[0].weight.fill_(2.0)
    with outer.optimizer.ema_weights():
        pass
    assert bool((model[0].weight == 2.0).all())


def test_loaded_masters_outlast_averages_before_the_model_is_loaded(start: Any) -> None:
    run = start()
    saved = copy.deepcopy((run.model.state_dict(), run.outer.state_dict()))
    masters = [owned.detach().clone() for _, owned in run.pairs()]
    resumed = start()
    with torch.no_grad():
        resumed.model[0].weight.fill_(0.5)  # as an initialization of the program's own
    resumed.outer.load_state_dict(saved[1])
    with resumed.inner.ema_weights():
        pass
    resumed.model.load_state_dict(saved[0])
    resumed.inner.remake_masters()
    for (_, owned), expected in zip(resumed.pairs(), masters, strict=True):
        assert torch.equal(owned, expected)


#: Methods as a program calls them between two steps.
CALLS: dict[str, Callable[[Run], Any]] = {
    "add_param_group": lambda run: run.inner.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(2))]}
    ),
    "ema_weights": lambda run: run.inner.ema_weights().__enter__(),
    "load_state_dict": lambda run: run.inner.load_state_dict(run.inner.state_dict()),
    "make_capturable": lambda run: run.inner.make_capturable(),
    "remake_masters": lambda run: run.inner.remake_masters(),
    "step": lambda run: run.train(7),
    "swap_ema_": lambda run: run.inner.swap_ema_(),
    "zero_grad": lambda run: run.inner.zero_grad(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_model_and_masters_agree_after_every_method(call: Any, start: Any) -> None:
    run = start()
    call(run)
    assert run.in_agreement()
