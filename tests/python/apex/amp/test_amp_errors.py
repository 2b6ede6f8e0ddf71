# SPDX-License-Identifier: BSD-3-Clause
"""Bad input to apex.amp: what the message says, and that nothing has been changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.amp import make_model, tensors_of
from support.compare import assert_all_same_bits
from torch import nn

import torchfuse.parallel
from torchfuse.apex.fp16_utils import FP16_Optimizer
from torchfuse.optimizers import FusedAdam

BF16 = torch.bfloat16


def refused(
    amp: Any,
    error: type[Exception],
    message: str,
    models: Any = None,
    optimizers: Any = None,
    **options: Any,
) -> None:
    """Fails unless initialize raises, and leaves models, optimizers and state alone."""
    model = make_model()
    optimizer = FusedAdam(model.parameters())
    step, before, kind = optimizer.step, tensors_of(model, [], optimizer), type(model)
    state = dict(vars(amp._amp_state))
    with pytest.raises(error, match=rf"amp\.initialize: expected {message}"):
        amp.initialize([model, *(models or [])], [optimizer, *(optimizers or [])], **options)
    assert (type(model), optimizer.step) == (kind, step)
    assert_all_same_bits(tensors_of(model, [], optimizer), before)
    assert not hasattr(optimizer, "_amp_stash")
    assert vars(amp._amp_state) == state


# Options.


@pytest.mark.parametrize("level", ["01", "O4", 1, None])
def test_unknown_levels(amp: Any, level: Any) -> None:
    message = (
        rf"opt_level to be one of 'O0', 'O1', 'O2', 'O3', got {level!r}\. The first character is "
        r"the letter O, not the number zero\."
    )
    refused(amp, RuntimeError, message, opt_level=level)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cast_model_type": BF16}, "no cast_model_type with .* 'O1'.*, to patch_torch_functions"),
        ({"keep_batchnorm_fp32": "False"}, "no keep_batchnorm_fp32 with opt_level 'O1'"),
        ({"master_weights": True}, "no master_weights with opt_level 'O1', got True"),
        (
            {"opt_level": "O2", "patch_torch_functions": True},
            "patch_torch_functions=True only with opt_level 'O1', got 'O2'",
        ),
        (
            {"opt_level": "O3", "patch_torch_functions_type": BF16},
            "patch_torch_functions_type only with opt_level 'O1', got 'O3'",
        ),
    ],
)
def test_options_that_a_level_excludes(amp: Any, options: dict[str, Any], message: str) -> None:
    remedy = r".*To use this combination anyway, set amp\._amp_state\.hard_override = True\."
    refused(amp, RuntimeError, message + remedy, **options)
    amp._amp_state.hard_override = True
    amp.initialize(make_model(), verbosity=0, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": "fast"}, "loss_scale to be 'dynamic' or a positive.*, got 'fast'"),
        ({"loss_scale": -1.0}, "loss_scale to be 'dynamic' or a positive.*, got -1.0"),
        ({"loss_scale": "inf"}, "loss_scale to be 'dynamic' or a positive.*, got 'inf'"),
        ({"loss_scale": True}, "loss_scale to be 'dynamic' or a positive, finite number"),
        (
            {"opt_level": "O2", "keep_batchnorm_fp32": "yes"},
            "keep_batchnorm_fp32 to be a bool, 'True', 'False' or None, got 'yes'",
        ),
        ({"opt_level": "O2", "master_weights": "no"}, "master_weights to be a bool, 'True', 'Fal"),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, "cast_model_type to be torch.float3"),
        ({"patch_torch_functions_type": torch.float32}, "patch_torch_functions_type to be torch"),
        ({"cast_model_outputs": torch.int8}, "cast_model_outputs to be a floating-point dtype, g"),
        ({"num_losses": 0}, "num_losses to be an int of at least 1, got 0"),
        ({"num_losses": 1.5}, "num_losses to be an int of at least 1, got 1.5"),
        ({"min_loss_scale": 0.0}, "min_loss_scale to be a positive, finite number, got 0.0"),
        ({"max_loss_scale": None}, "max_loss_scale to be a positive, finite number, got None"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ".*most max_loss_scale, got 8.0 and 4.0"),
    ],
)
def test_values_that_an_option_cannot_have(amp: Any, options: dict[str, Any], message: str) -> None:
    refused(amp, ValueError, message, **options)


@pytest.mark.parametrize("enabled", ["O2", "False", 2])
def test_enabled_is_a_bool(amp: Any, enabled: Any) -> None:
    message = f"enabled to be a bool, got {enabled!r}. Pass a level by na"
    refused(amp, TypeError, message, enabled=enabled)


# Models.


def test_other_objects_as_models(amp: Any) -> None:
    ours, torchs = torchfuse.parallel.DistributedDataParallel, nn.parallel.DistributedDataParallel
    for kind in (nn.DataParallel, ours, torchs):
        wrapped: Any = kind.__new__(kind)  # without a process group
        nn.Module.__init__(wrapped)
        message = (
            rf"models\[1\] to be the model itself, got {kind.__name__}\. Wrap the model after "
            r"amp\.initialize\."
        )
        refused(amp, RuntimeError, message, [wrapped])
    message = r"models\[1\] to be a torch\.nn\.Module, got "
    refused(amp, TypeError, message + "str", ["model"])
    scripted = torch.jit.script(nn.Linear(2, 2))
    refused(amp, TypeError, r"models\[1\] to be a Python module, got a ScriptModule", [scripted])
    for models in ((make_model(),), {"a": make_model()}, None):
        with pytest.raises(TypeError, match=r"amp\.initialize: expected models"):
            amp.initialize(models)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_models_that_are_not_fp32(amp: Any, dtype: torch.dtype) -> None:
    model = make_model()
    model[3].to(dtype)
    message = (
        rf"models\[1\] to be in fp32, got {dtype} for '3\.weight'\. Omit \.half\(\) and .*To allow "
        r"this, set amp\._amp_state\.allow_incoming_model_not_fp32 = True\."
    )
    refused(amp, RuntimeError, message, [model])
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model[3].weight.dtype == torch.float16


def test_a_model_in_fp16_that_has_been_here(amp: Any) -> None:
    model = amp.initialize(make_model(), opt_level="O2", verbosity=0)
    refused(amp, RuntimeError, r".*The model was passed to amp\.initialize before", [model])


# Optimizers.


def test_other_objects_as_optimizers(amp: Any) -> None:
    model = make_model()
    optimizer, again = FusedAdam(model.parameters()), FusedAdam(model.parameters())
    message = r"optimizers\[{}\] to be passed to amp\.initialize once, got this FusedAdam a second"
    amp.initialize(model, optimizer, verbosity=0)
    refused(amp, RuntimeError, message.format(1), [], [optimizer])
    refused(amp, RuntimeError, message.format(2), [], [again, again])
    wrapped = FP16_Optimizer(torch.optim.SGD(make_model().parameters(), lr=0.1))
    refused(amp, RuntimeError, r"optimizers\[1\] .*, got an FP16_Optimizer", [], [wrapped])
    message = r"optimizers\[1\] to be a torch\.optim\.Optimizer, got int"
    refused(amp, TypeError, message, [], [3])
    with pytest.raises(TypeError, match="expected optimizers to be one object or a list, got tup"):
        amp.initialize(make_model(), (again,))


# scale_loss.


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_optimizers_that_initialize_has_not_seen(amp: Any, level: str) -> None:
    model = make_model()
    known, other = FusedAdam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, known, opt_level=level, verbosity=0)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    kept = model[0].weight.grad
    for optimizers, name in ((other, "optimizers"), ([known, other], r"optimizers\[1\]")):
        message = rf"amp\.scale_loss: expected {name} to be prepared by amp\.initialize, got"
        with pytest.raises(ValueError, match=message), amp.scale_loss(torch.ones(()), optimizers):
            pass
    assert model[0].weight.grad is kept


def test_arguments_that_are_refused(amp: Any) -> None:
    model = make_model()
    _, optimizer = amp.initialize(model, FusedAdam(model.parameters()), verbosity=0)
    one = torch.ones(())
    with pytest.raises(TypeError, match="to be an optimizer, got str"):
        amp.scale_loss(one, "adam").__enter__()
    with pytest.raises(TypeError, match=r"amp\.scale_loss: expected loss to be a tensor, got flo"):
        amp.scale_loss(3.0, optimizer).__enter__()
    for loss_id in (1, -1, None, 0.5):
        message = (
            rf"amp\.scale_loss: expected loss_id to be in range\(1\), got {loss_id}\. Pass the "
            r"number of losses to amp\.initialize as num_losses\."
        )
        with pytest.raises(ValueError, match=message):
            amp.scale_loss(one, optimizer, loss_id=loss_id).__enter__()
    with pytest.raises(TypeError, match=r"amp\.master_params: expected an optimizer, got Sequenti"):
        list(amp.master_params(model))
    message = r"amp\.load_state_dict: expected state_dict to be a dict, g"
    with pytest.raises(TypeError, match=message):
        amp.load_state_dict(None)


def test_calls_before_initialize(amp: Any) -> None:
    optimizer = FusedAdam(make_model().parameters())
    calls = {
        "scale_loss": lambda: amp.scale_loss(torch.ones(()), optimizer).__enter__(),
        "state_dict": amp.state_dict,
        "load_state_dict": lambda: amp.load_state_dict({}),
    }
    for name, call in calls.items():
        message = rf"amp\.{name}\(\) was called before amp\.initialize\. Call model, optimizer = "
        with pytest.raises(RuntimeError, match=message):
            call()


def test_the_handles_of_old_programs(amp: Any) -> None:
    """One that is switched off does nothing; another is refused."""
    with pytest.raises(RuntimeError, match=r"amp\.init: .*amp\.initialize\(model, optimizer"):
        amp.init(enabled=True)
    handle = amp.init(enabled=False)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([param], lr=0.5), num_loss=2)
    loss = param.sum()
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    with optimizer.scale_loss(loss) as scaled:
        scaled.backward()
    optimizer.step()
    assert not handle.is_active()
    assert torch.equal(param, torch.full((2,), 0.5))
