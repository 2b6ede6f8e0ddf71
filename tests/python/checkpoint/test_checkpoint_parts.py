# SPDX-License-Identifier: BSD-3-Clause
"""Objects of checkpoints: their classes, and all of them as they were when one does not load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits
from torch import Tensor, nn
from torch.optim import lr_scheduler

import torchfuse
from torchfuse.apex.fp16_utils import FP16_Optimizer
from torchfuse.optimizers import FusedAdam, FusedLAMB, FusedSGD
from torchfuse.parallel import LARC


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "last.pt"


def stepped(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    param = nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = kind([param], lr=0.1, **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


class Refusing:
    """A part that loads only what it has saved itself."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["number"] != self.number:
            raise RuntimeError(f"no {state['number']}")


# --- What is restored -----------------------------------------------------------------------------


@pytest.mark.parametrize("around", [lambda optimizer: optimizer, LARC])
def test_a_refused_load_does_not_turn_averages_and_masters_on(path: Path, around: Any) -> None:
    saved = stepped(FusedAdam, torch.bfloat16, ema_decay=0.9, ema_start_step=5, master_weights=True)
    lr_scheduler.StepLR(saved, 3)
    torchfuse.save_checkpoint(path, optimizer=saved, other=Refusing())
    mine = around(stepped(FusedAdam, torch.bfloat16, weight_decay=0.5))
    before = copy.deepcopy(mine.state_dict())
    with pytest.raises(ValueError, match=r"last.pt's 'other' does not fit: no 0"):
        torchfuse.load_checkpoint(path, optimizer=mine, other=Refusing(1))
    assert str(mine.state_dict()) == str(before)
    mine.param_groups[0]["params"][0].grad = torch.ones(2).bfloat16()
    mine.step()
    assert "ema_param" not in mine.state_dict()["state"][0]


def test_a_refused_load_leaves_no_attributes_in_schedulers(path: Path) -> None:
    optimizer = stepped(torch.optim.SGD)

    def made(factor: float, **more: Any) -> lr_scheduler.SequentialLR:
        first = lr_scheduler.LinearLR(optimizer, factor)
        vars(first).update(more)
        return lr_scheduler.SequentialLR(optimizer, [first], milestones=[])

    torchfuse.save_checkpoint(path, scheduler=made(0.5, more=3), other=Refusing())
    mine = made(0.25)
    before = copy.deepcopy(mine.state_dict())
    with pytest.raises(ValueError, match="'other' does not fit"):
        torchfuse.load_checkpoint(path, scheduler=mine, other=Refusing(1))
    assert mine.state_dict() == before


class ExtraState(nn.Linear):
    """A module of a version that refuses others."""

    def __init__(self, version: int) -> None:
        super().__init__(3, 2)
        self.version = version

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self.version}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if state["version"] != self.version:
            raise ValueError("another version")


class Migration(nn.Linear):
    """A module with loading of its own, which fails when it has loaded."""

    def __init__(self, version: int) -> None:
        super().__init__(3, 2)
        self.version = version

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.version == 2:
            raise KeyError("migration")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ExtraState, "another version"),
        (Migration, "it lacks the key 'migration'"),
    ],
)
def test_a_model_that_fails_changes_nothing(
    path: Path, make: Callable[[int], nn.Module], message: str
) -> None:
    parts: dict[str, Any] = {"first": nn.Linear(2, 2), "model": make(1)}
    torchfuse.save_checkpoint(path, rng=True, optimizer=stepped(FusedAdam), **parts)
    parts = {"first": nn.Linear(2, 2), "model": make(2), "optimizer": stepped(FusedAdam, eps=0.5)}
    before = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    torch.randn(2)
    moved = torch.get_rng_state()
    message = f"load_checkpoint: .*last.pt's 'model' does not fit: .*{message}"
    with pytest.raises(ValueError, match=message):
        torchfuse.load_checkpoint(path, rng=True, **parts)
    assert str({name: part.state_dict() for name, part in parts.items()}) == str(before)
    assert torch.equal(torch.get_rng_state(), moved)


# --- Models ---------------------------------------------------------------------------------------


def expanded() -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("extra", torch.zeros(1).expand(3))
    return model


def of_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (expanded, r"\['extra'\] to be loaded into a tensor with memory for each element"),
        (
            lambda: nn.Linear(3, 2, device="meta"),
            r"\['weight'\] to be loaded into .*got a meta tensor",
        ),
        (of_inference_mode, r"\['weight'\] .* created outside of inference mode, got an inference"),
        (lambda: nn.LazyLinear(2), r"\['weight'\] to be .* a shape, got a lazy parameter. Run"),
    ],
)
def test_models_that_cannot_be_written_are_refused(
    path: Path, make: Callable[[], nn.Module], message: str
) -> None:
    saved = nn.Linear(3, 2)
    if make is expanded:
        saved.register_buffer("extra", torch.zeros(3))
    torchfuse.save_checkpoint(path, model=saved)
    with pytest.raises(ValueError, match=f"load_checkpoint: expected .*last.pt's 'model'{message}"):
        torchfuse.load_checkpoint(path, model=make())
    torchfuse.save_checkpoint(path, model=nn.Linear(3, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"\['weight'\] to be real like the model's, got"):
        torchfuse.load_checkpoint(path, model=nn.Linear(3, 2))


def test_loading_in_inference_mode_leaves_tensors_for_training(path: Path) -> None:
    torchfuse.save_checkpoint(path, optimizer=stepped(FusedAdam))
    mine = stepped(FusedAdam)
    with torch.inference_mode():
        torchfuse.load_checkpoint(path, optimizer=mine)
    (state,) = mine.state.values()
    assert not any(value.is_inference() for value in state.values() if isinstance(value, Tensor))


# --- Classes --------------------------------------------------------------------------------------


def rates(kind: Any, *arguments: Any) -> Any:
    return kind(stepped(torch.optim.SGD), *arguments)


def with_optimizer(part: Any) -> dict[str, Any]:
    """A scheduler is not saved without its optimizer."""
    scheduled = isinstance(part, lr_scheduler.LRScheduler)
    return {"part": part} | ({"optimizer": part.optimizer} if scheduled else {})


class OwnAdam(FusedAdam):
    """A class of the program."""


@pytest.mark.parametrize(
    ("saved", "mine", "classes"),
    [
        (lambda: stepped(FusedLAMB), lambda: stepped(FusedAdam), "FusedAdam .* FusedLAMB"),
        (lambda: stepped(torch.optim.AdamW), lambda: stepped(FusedAdam), "FusedAdam .* AdamW"),
        (lambda: stepped(FusedAdam), lambda: LARC(stepped(FusedSGD)), "FusedSGD .* FusedAdam"),
        (
            lambda: rates(lr_scheduler.CosineAnnealingLR, 10),
            lambda: rates(lr_scheduler.StepLR, 10),
            "StepLR .* CosineAnnealingLR",
        ),
    ],
)
def test_another_class_is_refused(path: Path, saved: Any, mine: Any, classes: str) -> None:
    torchfuse.save_checkpoint(path, **with_optimizer(saved()))
    part = mine()
    before = copy.deepcopy(part.state_dict())
    own, written = classes.split(" .* ")
    message = f"to hold the state of {own} as 'part', got the state of {written}. Pass a"
    with pytest.raises(ValueError, match=message):
        torchfuse.load_checkpoint(path, **with_optimizer(part))
    assert str(part.state_dict()) == str(before)
    # A file without classes is not compared.
    contents = torch.load(path, weights_only=True)
    contents["torchfuse"].pop("classes")
    contents["part"] = part.state_dict()
    torch.save(contents, path)
    torchfuse.load_checkpoint(path, **with_optimizer(part))


@pytest.mark.parametrize(
    ("saved", "mine"),
    [
        (FusedAdam, OwnAdam),
        (OwnAdam, FusedAdam),
        (lambda *a, **k: LARC(FusedAdam(*a, **k)), FusedAdam),
        (FusedAdam, lambda *a, **k: LARC(FusedAdam(*a, **k))),
    ],
)
def test_classes_of_one_formula_load_each_other(path: Path, saved: Any, mine: Any) -> None:
    parts = [stepped(saved), stepped(mine)]
    parts[1].step()
    torchfuse.save_checkpoint(path, part=parts[0])
    torchfuse.load_checkpoint(path, part=parts[1])
    first, second = (part.state_dict()["state"][0]["exp_avg"] for part in parts)
    assert_same_bits(second, first)


def test_a_file_names_classes_and_holds_plain_states(path: Path) -> None:
    optimizer = stepped(OwnAdam)
    parts: dict[str, Any] = {"model": nn.Linear(1, 1), "optimizer": optimizer}
    parts["scheduler"] = lr_scheduler.StepLR(optimizer, 3)
    parts["other"] = stepped(torch.optim.SGD)
    torchfuse.save_checkpoint(path, **parts)
    contents = torch.load(path, weights_only=True)
    assert list(contents) == [*parts, "values", "torchfuse"]
    classes = contents["torchfuse"]["classes"]
    assert classes == {"optimizer": "FusedAdam", "scheduler": "StepLR", "other": "SGD"}
    assert_same_bits(contents["model"]["weight"], parts["model"].weight.detach())


def test_names_of_compiled_modules_are_plain_and_those_of_others_stay(path: Path) -> None:
    model = nn.Module()
    model._orig_mod, model.head = nn.Linear(2, 2), nn.Linear(2, 1)
    torchfuse.save_checkpoint(path, model=model)
    assert len(torch.load(path, weights_only=True)["model"]) == 4
    shared = torch.compile(nn.Linear(2, 2))
    torchfuse.save_checkpoint(path, model=nn.Sequential(shared, shared))
    assert sorted(torch.load(path)["model"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_a_compiled_submodule_is_saved_under_its_own_names(path: Path) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    compiled = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 1)))
    torchfuse.save_checkpoint(path, model=compiled)
    assert sorted(torch.load(path)["model"]) == sorted(plain.state_dict())
    torchfuse.load_checkpoint(path, model=plain)
    assert torch.equal(plain[1].weight, compiled[1].weight)
    # Files that have the longer names.
    contents = torch.load(path)
    contents["model"] = compiled.state_dict()
    torch.save(contents, path)
    for model in (plain, compiled):
        with torch.no_grad():
            model[1].weight.zero_()
        torchfuse.load_checkpoint(path, model=model)
        assert torch.equal(model[1].weight, contents["model"]["1._orig_mod.weight"])


def test_a_state_without_its_parameter_is_named() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedAdam(params, lr=0.1)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    del optimizer.param_groups[0]["params"][1]
    with pytest.raises(
        ValueError, match=r"FusedAdam.state_dict: .* got a parameter of shape \[3\]"
    ):
        optimizer.state_dict()


# --- Schedulers: none without its optimizer -------------------------------------------------------


def test_a_scheduler_belongs_to_an_optimizer_of_the_checkpoint(path: Path) -> None:
    actors, critics = stepped(FusedAdam), stepped(FusedSGD)
    own, others = lr_scheduler.StepLR(actors, 3), lr_scheduler.StepLR(critics, 3)
    torchfuse.save_checkpoint(path, optimizer=actors, scheduler=own)
    refused = (
        ": expected 'scheduler' to be the scheduler of an optimizer in the checkpoint, got the "
        "scheduler of a FusedSGD that is not in it. Add this optimizer, or build the scheduler for "
        "an optimizer in the checkpoint."
    )
    before = actors.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.raises(ValueError, match=f"^save_checkpoint{refused}$"):
        torchfuse.save_checkpoint(path, optimizer=actors, scheduler=others)
    with pytest.raises(ValueError, match=f"^load_checkpoint{refused}$"):
        torchfuse.load_checkpoint(path, optimizer=actors, scheduler=others)
    assert_same_bits(actors.state_dict()["state"][0]["exp_avg"], before)
    with pytest.raises(ValueError, match=f"^save_checkpoint{refused}$"):
        torchfuse.save_checkpoint(path, scheduler=others)
    torchs = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="got the scheduler of a SGD that is not in it"):
        torchfuse.save_checkpoint(path, scheduler=lr_scheduler.StepLR(torchs, 3))
    # With its optimizer it is taken.
    both = {"scheduler": others, "critics": LARC(critics), "actors": actors}
    torchfuse.save_checkpoint(path, **both)
    torchfuse.load_checkpoint(path, **both)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as frameworks have them."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside
        self.param_groups = inside.param_groups

    def state_dict(self) -> Any:
        return self.inside.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inside.load_state_dict(state)


@pytest.mark.parametrize("around", [Wrapper, FP16_Optimizer])
def test_what_holds_the_optimizer_of_a_scheduler_is_not_refused(path: Path, around: Any) -> None:
    inside = stepped(FusedAdam)
    parts = {"optimizer": around(inside), "scheduler": lr_scheduler.StepLR(inside, 3)}
    torchfuse.save_checkpoint(path, **parts)
    torchfuse.load_checkpoint(path, **parts)
