# SPDX-License-Identifier: BSD-3-Clause
"""What subclasses and tools written for apex find on the optimizers, and may set."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.adam import make_params, random_grads, set_grads
from support.compare import assert_same_bits

from torchfuse import optimizers
from torchfuse.apex.native import amp_c
from torchfuse.optimizers import FusedLAMB, FusedMixedPrecisionLamb, FusedSGD

FUNCTIONS = {
    "FusedAdagrad": {"multi_tensor_adagrad": "multi_tensor_adagrad"},
    "FusedAdam": {
        "multi_tensor_adam": "multi_tensor_adam",
        "multi_tensor_adam_capturable": "multi_tensor_adam_capturable",
        "multi_tensor_adam_capturable_master": "multi_tensor_adam_capturable_master",
    },
    "FusedLAMB": {
        "multi_tensor_lamb": "multi_tensor_lamb",
        "multi_tensor_l2norm": "multi_tensor_l2norm",
    },
    "FusedMixedPrecisionLamb": {
        "multi_tensor_lamb": "multi_tensor_lamb_mp",
        "multi_tensor_l2norm": "multi_tensor_l2norm_mp",
    },
    "FusedNovoGrad": {"multi_tensor_novograd": "multi_tensor_novograd"},
    "FusedSGD": {"multi_tensor_sgd": "multi_tensor_sgd"},
}


@pytest.mark.parametrize(
    ("kind", "attribute", "function"),
    [(kind, *pair) for kind, pairs in FUNCTIONS.items() for pair in pairs.items()],
)
def test_classes_and_objects_have_apexs_functions(kind: str, attribute: str, function: str) -> None:
    made: Any = getattr(optimizers, kind)
    optimizer = made(make_params(), lr=0.1)
    assert getattr(made, attribute) is getattr(amp_c, function)
    assert getattr(optimizer, attribute) is getattr(amp_c, function)
    # apex sets them in the constructor, and so may subclasses.
    setattr(optimizer, attribute, len)
    assert getattr(optimizer, attribute) is len


def test_classes_do_not_have_functions_of_others() -> None:
    assert not hasattr(FusedSGD, "multi_tensor_adam")
    assert not hasattr(optimizers.FusedLion, "multi_tensor_l2norm")


# reduced_precision_dtype.


def reduced(dtype: torch.dtype | None) -> tuple[list[Any], FusedMixedPrecisionLamb]:
    params = make_params([(7,)], torch.bfloat16)
    groups = [{"params": params}, {"params": make_params([(5,)], torch.bfloat16, seed=2)}]
    return params, FusedMixedPrecisionLamb(groups, reduced_precision_dtype=dtype)


def test_the_reduced_dtype_that_is_set_is_that_of_the_constructor() -> None:
    (params, optimizer), (others, reference) = reduced(None), reduced(torch.bfloat16)
    optimizer.reduced_precision_dtype = torch.bfloat16
    assert optimizer.reduced_precision_dtype == torch.bfloat16
    assert optimizer.master_weights
    for tensors, lamb in ((params, optimizer), (others, reference)):
        for seed in (1, 2):
            set_grads(tensors, random_grads(tensors, seed))
            lamb.step()
    assert_same_bits(params[0].detach(), others[0].detach())
    master = optimizer.state[params[0]]["master_param"]
    assert_same_bits(master, reference.state[others[0]]["master_param"])
    assert [group["master_weights"] for group in optimizer.param_groups] == [True, True]
    optimizer.add_param_group({"params": make_params([(3,)], torch.bfloat16, seed=3)})
    assert optimizer.param_groups[2]["reduced_precision_dtype"] == torch.bfloat16


def test_no_reduced_dtype_keeps_no_masters() -> None:
    params, optimizer = reduced(torch.bfloat16)
    optimizer.reduced_precision_dtype = None
    set_grads(params, random_grads(params, 1))
    optimizer.step()
    assert "master_param" not in optimizer.state[params[0]]


def test_the_reduced_dtype_is_fixed_by_the_first_step() -> None:
    params, optimizer = reduced(torch.bfloat16)
    set_grads(params, random_grads(params, 1))
    optimizer.step()
    message = "FusedMixedPrecisionLamb: expected reduced_precision_dtype to be set before the first"
    with pytest.raises(RuntimeError, match=message):
        optimizer.reduced_precision_dtype = torch.float16
    assert optimizer.reduced_precision_dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"to be None, torch.float16 or torch.bfloat16, got .*32"):
        reduced(None)[1].reduced_precision_dtype = torch.float32


# The scale of FusedSGD's next step.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_has_the_scale_of_the_next_step(copied: Any) -> None:
    optimizer = FusedSGD(make_params([(5,)]), lr=0.1, momentum=0.9)
    optimizer.most_recent_scale = 8.0
    optimizer.scale_set_by_backward = True
    other = copied(optimizer)
    assert (other.most_recent_scale, other.scale_set_by_backward) == (8.0, True)
    (mine,), (theirs,) = optimizer.param_groups[0]["params"], other.param_groups[0]["params"]
    for param, sgd in ((mine, optimizer), (theirs, other)):
        set_grads([param], random_grads([param], 1, scale=8.0))
        sgd.step()
    assert_same_bits(mine.detach(), theirs.detach())
    assert (other.most_recent_scale, other.scale_set_by_backward) == (1.0, False)


# Unknown arguments.

NAMES = [name for name in optimizers.__all__ if name not in ("FusedOptimizer",)]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("Fused")])
def test_an_unknown_argument_names_the_class_that_was_called(name: str) -> None:
    kind: Any = getattr(optimizers, name)
    message = rf"^{name}\.__init__\(\) got an unexpected keyword argument 'lerning_rate'"
    with pytest.raises(TypeError, match=message):
        kind(make_params(), lr=0.1, lerning_rate=0.1)


def test_an_unknown_argument_names_a_subclass() -> None:
    class Mine(FusedLAMB):
        pass

    with pytest.raises(TypeError, match=r"^.*Mine\.__init__\(\) got an unexpected keyword .*'no'"):
        Mine(make_params(), no=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("clip_grad_norm", "max_grad_norm"), ("adamw_mode", "adam_w_mode"), ("beta", "betas")],
)
def test_an_unknown_argument_is_answered_with_a_similar_one(wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"keyword argument '{wrong}'\. Did you mean '{right}'\?$"):
        optimizers.FusedAdam(make_params(), **{wrong: 1.0})
    with pytest.raises(TypeError, match=r"keyword argument 'xyzxyz'$"):
        optimizers.FusedAdam(make_params(), xyzxyz=1.0)  # type: ignore[call-arg]
