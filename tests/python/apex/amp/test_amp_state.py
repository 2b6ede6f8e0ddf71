# SPDX-License-Identifier: BSD-3-Clause
"""What published programs read and write behind apex.amp's functions."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from support.amp import make_batches, make_model, tensors_of, train_with
from support.compare import assert_all_same_bits
from torch.nn.functional import cross_entropy

from torchfuse.optimizers import FusedAdam, FusedLAMB

BATCHES = make_batches(4)


def prepared(amp: Any, level: str = "O2", **options: Any) -> tuple[Any, Any]:
    model = make_model()
    optimizer = FusedLAMB(model.parameters(), lr=1e-2)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


# Names.


def test_the_state_object_hides_its_module(amp: Any) -> None:
    state = amp._amp_state
    assert state is vars(amp)["_amp_state"]
    names: dict[str, Any] = {}
    exec("from apex.amp import _amp_state", names)
    assert names["_amp_state"] is state
    module = importlib.import_module("apex.amp._amp_state")
    assert module._amp_state is state
    assert amp._amp_state is state
    exec("import apex.amp._amp_state; from apex.amp._amp_state import maybe_print", names)
    assert names["apex"].amp._amp_state is state


def test_names_of_apex(amp: Any) -> None:
    exported = {
        *("init", "half_function", "float_function", "promote_function", "register_half_function"),
        *("register_float_function", "register_promote_function", "scale_loss", "disable_casts"),
        *("initialize", "state_dict", "load_state_dict", "master_params", "_amp_state"),
    }
    assert exported <= set(amp.__dict__)
    assert exported <= set(amp.__all__)
    for module, name in (
        ("frontend", "initialize"),
        ("handle", "scale_loss"),
        ("amp", "float_function"),
    ):
        found = vars(importlib.import_module(f"apex.amp.{module}"))
        assert found[name] is getattr(amp, name)
    assert importlib.import_module("apex.amp.scaler").LossScaler is type(_scaler(amp))


def _scaler(amp: Any) -> Any:
    prepared(amp)
    return amp._amp_state.loss_scalers[0]


# The state.


def test_the_state_before_and_after_initialize(amp: Any) -> None:
    state = amp._amp_state
    assert not hasattr(state, "opt_properties")
    assert not hasattr(state, "loss_scalers")
    assert not state.handle.is_active()
    assert (state.hard_override, state.allow_incoming_model_not_fp32) == (False, False)
    prepared(amp, "O1", num_losses=2, min_loss_scale=2.0, max_loss_scale=1024.0)
    assert (state.verbosity, state.min_loss_scale, state.max_loss_scale) == (0, 2.0, 1024.0)
    assert len(state.loss_scalers) == 2
    assert state.handle.is_active()
    prepared(amp, "O2")
    assert not state.handle.is_active()


def test_options_by_name(amp: Any) -> None:
    prepared(amp, "O2", keep_batchnorm_fp32="False", loss_scale="64")
    properties = amp._amp_state.opt_properties
    assert properties.options == {
        "enabled": True,
        "opt_level": "O2",
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "patch_torch_functions_type": None,
        "keep_batchnorm_fp32": False,
        "master_weights": True,
        "loss_scale": 64.0,
    }
    for name, value in properties.options.items():
        assert getattr(properties, name) == value
        assert name in dir(properties)
    properties.loss_scale = "dynamic"
    assert properties.options["loss_scale"] == "dynamic"
    with pytest.raises(ValueError, match="expected loss_scale to be"):
        properties.loss_scale = "none"
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        _ = properties.missing


def test_the_options_are_printed(amp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(make_model(), opt_level="O2", loss_scale="128.0")
    printed = capsys.readouterr().out
    assert printed.startswith("apex.amp by torchfuse: opt_level O2\n")
    assert "loss_scale                 : 128.0  (set by the program)\n" in printed
    assert "master_weights             : True\n" in printed
    prepared(amp)
    assert capsys.readouterr().out == ""


# The loss scale.


def test_the_scale_can_be_set(amp: Any) -> None:
    _, optimizer = prepared(amp)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2.0**8
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 2.0**8
    assert scaler.loss_scale() == 2.0**8


def test_a_program_that_reduces_and_checks_by_itself(amp: Any) -> None:
    """As BERT's does: it delays the check, and scales, sums and unscales fp32 gradients."""
    runs = []
    for by_itself in (False, True):
        model, optimizer = prepared(amp)
        scaler = amp._amp_state.loss_scalers[0]
        scaler._loss_scale = 2.0**10
        flag = torch.zeros(1, dtype=torch.int32)
        for step, (data, target) in enumerate(BATCHES):
            loss = cross_entropy(model(data), target)
            with amp.scale_loss(loss, optimizer, delay_overflow_check=by_itself) as scaled_loss:
                scaled_loss.backward()
                if step == 1:
                    model[0].weight.grad[0, 0] = float("inf")
            if by_itself:
                grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
                assert {grad.dtype for grad in grads} == {torch.float32}
                flag.fill_(not all(grad.isfinite().all() for grad in grads))
                kept, scaler._overflow_buf = scaler._overflow_buf, flag
                overflow = scaler.update_scale()
                scaler._overflow_buf = kept
                assert overflow == scaler._has_overflow == (step == 1)
                if not overflow:
                    optimizer.step()
                elif amp._amp_state.opt_properties.master_weights:
                    for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                        param.grad = None
            else:
                optimizer.step()
            for param in model.parameters():
                param.grad = None
        assert scaler.loss_scale() == 2.0**9
        runs.append(tensors_of(model, list(amp.master_params(optimizer)), optimizer))
    assert_all_same_bits(*runs)


def test_masters_can_be_made_and_set_early(amp: Any) -> None:
    model, optimizer = prepared(amp)
    train_with(amp, model, optimizer, BATCHES[:2])
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "master params": list(amp.master_params(optimizer)),
    }
    saved = copy.deepcopy(parts)
    del saved["optimizer"]["master_params"]
    train_with(amp, model, optimizer, BATCHES[2:])
    whole = tensors_of(model, list(amp.master_params(optimizer)), optimizer)

    model = make_model()
    model.load_state_dict(saved["model"])
    optimizer = FusedLAMB(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    stash = optimizer._amp_stash
    assert not stash.lazy_init_called
    assert next(amp.master_params(optimizer)) is model[0].weight
    optimizer._lazy_init_maybe_master_weights()
    stash.lazy_init_called = True
    optimizer.load_state_dict(saved["optimizer"])
    for param, master in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        assert param.dtype == torch.float32
        param.data.copy_(master.data)
    train_with(amp, model, optimizer, BATCHES[2:])
    assert_all_same_bits(tensors_of(model, list(amp.master_params(optimizer)), optimizer), whole)


def test_lists_of_parameters(amp: Any) -> None:
    model = make_model()
    layers = [list(model[0].parameters()), [*model[1].parameters(), *model[3].parameters()]]
    optimizer: Any = FusedAdam([{"params": params} for params in layers])
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train_with(amp, model, optimizer, BATCHES[:1])
    stash = optimizer._amp_stash
    short = [p for p in model.parameters() if p.dtype == torch.float16]
    assert [id(p) for p in stash.all_fp16_params] == [id(p) for p in short]
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        assert torch.equal(master.half(), param)
    norm = [id(p) for p in model[1].parameters()]
    assert [id(p) for p in stash.all_fp32_from_fp32_params] == norm
    assert [len(group) for group in stash.fp16_groups] == [2, 2]
    assert [len(group) for group in stash.fp32_from_fp16_groups] == [2, 2]
    plain: Any = FusedAdam(make_model().parameters())
    amp.initialize(make_model(), plain, opt_level="O1", verbosity=0)
    plain._lazy_init_maybe_master_weights()
    assert (len(plain._amp_stash.all_fp32_params), plain._amp_stash.all_fp16_params) == (6, [])
    assert plain._amp_stash.lazy_init_called
