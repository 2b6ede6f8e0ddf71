# SPDX-License-Identifier: BSD-3-Clause
"""Functions that cast their arguments under O1."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from support.amp import make_model
from torch import Tensor

import torchfuse.normalization
from torchfuse.normalization import _autocast

HALF, SHORT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
NUMBERS = {dtype: torch.ones(2, 2, dtype=dtype) for dtype in (HALF, SHORT, FLOAT, DOUBLE)}


def first_two(a: Any, b: Any) -> list[torch.dtype]:
    return [a.dtype, b.dtype]


def under_o1(amp: Any, **options: Any) -> Any:
    return amp.initialize(make_model(), opt_level="O1", verbosity=0, **options)


@pytest.mark.parametrize(
    ("decorator", "given", "expected"),
    [
        ("half_function", (FLOAT, HALF), (HALF, HALF)),
        ("half_function", (DOUBLE, SHORT), (DOUBLE, HALF)),
        ("float_function", (FLOAT, HALF), (FLOAT, FLOAT)),
        ("float_function", (DOUBLE, SHORT), (DOUBLE, FLOAT)),
        ("promote_function", (FLOAT, HALF), (FLOAT, FLOAT)),
        ("promote_function", (HALF, HALF), (HALF, HALF)),
        ("promote_function", (HALF, SHORT), (FLOAT, FLOAT)),
        ("promote_function", (DOUBLE, HALF), (DOUBLE, DOUBLE)),
    ],
)
def test_arguments_are_cast(
    amp: Any, decorator: str, given: tuple[Any, ...], expected: tuple[Any, ...]
) -> None:
    decorated = getattr(amp, decorator)(first_two)
    a, b = (NUMBERS[dtype] for dtype in given)
    assert decorated(a, b) == list(given)  # not initialized
    for level in ("O0", "O2", "O3"):
        amp.initialize(make_model(), opt_level=level, verbosity=0)
        assert decorated(a, b=b) == list(given)
    under_o1(amp)
    assert decorated(a, b) == decorated(a, b=b) == decorated(b=b, a=a) == list(expected)
    with amp.disable_casts():
        assert decorated(a, b) == list(given)
    amp.initialize(make_model(), enabled=False)
    assert decorated(a, b) == list(given)


def test_nested_arguments_and_others(amp: Any) -> None:
    under_o1(amp, patch_torch_functions_type=SHORT)
    integers = torch.ones(2, dtype=torch.int64)

    class Model:
        @amp.half_function
        def look(self, values: Any, *, flag: bool) -> Any:
            """Documented."""
            return values["a"][0].dtype, values["b"] is integers, flag

    look = Model().look
    assert look({"a": [NUMBERS[FLOAT]], "b": integers}, flag=True) == (SHORT, True, True)
    assert (look.__name__, look.__doc__) == ("look", "Documented.")
    assert amp.promote_function(lambda x: x)(3) == 3
    x = torch.ones(3, requires_grad=True)
    amp.half_function(lambda t: t * 2)(x).float().sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.tolist()) == (FLOAT, [2.0, 2.0, 2.0])


def test_autocast_inside(amp: Any) -> None:
    """On inside functions of the program, off in fp32 functions and around torch's own."""
    under_o1(amp)
    enabled: list[bool] = []

    def look(x: Tensor) -> Tensor:
        enabled.append(torch.is_autocast_enabled("cpu"))
        return torch.mm(x, x)

    for decorator, dtype in (
        (amp.half_function, HALF),
        (amp.float_function, FLOAT),
        (amp.promote_function, HALF),
    ):
        assert decorator(look)(NUMBERS[FLOAT]).dtype == dtype
    assert enabled == [True, False, True]
    with torch.autocast("cpu", dtype=SHORT):
        assert amp.float_function(torch.mm)(NUMBERS[HALF], NUMBERS[HALF]).dtype == FLOAT
        assert (
            amp.half_function(torch.nn.functional.mse_loss)(NUMBERS[FLOAT], NUMBERS[FLOAT]).dtype
            == HALF
        )


@pytest.mark.parametrize("kind", ["half", "float", "promote"])
def test_registration(amp: Any, kind: str) -> None:
    register, decorate = getattr(amp, f"register_{kind}_function"), getattr(amp, f"{kind}_function")
    module = types.SimpleNamespace(__name__="layers", look=first_two)
    register(module, "look")
    given = NUMBERS[FLOAT], NUMBERS[HALF]
    under_o1(amp)
    assert module.look(*given) == decorate(first_two)(*given)
    # The last registration counts.
    amp.register_half_function(module, "look")
    assert module.look(*given) == [HALF, HALF]
    assert module.look.__wrapped__ is first_two
    for name in ("missing", "__name__"):
        message = (
            rf"amp.register_{kind}_function: expected 'layers' to have a function '{name}', got"
        )
        with pytest.raises(ValueError, match=message):
            register(module, name)


def test_a_function_of_torch_may_be_registered(amp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "einsum", torch.einsum)  # restores it
    amp.register_half_function(torch, "einsum")
    under_o1(amp)
    assert torch.einsum("ij,jk->ik", NUMBERS[FLOAT], NUMBERS[FLOAT]).dtype == HALF


def test_disabled_casts_reach_into_models_and_threads(amp: Any) -> None:
    dtypes: list[torch.dtype] = []
    model = under_o1(amp)
    model[0].register_forward_hook(lambda *given: dtypes.append(given[2].dtype))

    def run() -> None:
        model(torch.ones(2, 6))

    run()
    with amp.disable_casts():
        run()
        with amp.disable_casts():
            run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    run()
    assert dtypes == [HALF, FLOAT, FLOAT, FLOAT, HALF]
    with torch.autocast("cpu", dtype=HALF), amp.disable_casts():
        assert torch.mm(NUMBERS[FLOAT], NUMBERS[FLOAT]).dtype == FLOAT
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert amp._amp_state.handle.is_active()


#: Infinite in fp16.
LARGE = torch.tensor([[1e5, 2e5, 3e5, -1e5]])


class Residual(torch.nn.Module):
    """Normalizes what O1 leaves in fp32, and notes the dtype of the result."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm
        self.found: Tensor = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.found = self.norm(x)
        return self.found


NORMS: dict[str, Any] = {
    **{name: lambda cls: cls(4) for name in torchfuse.normalization.__all__ if name[0] in "FM"},
    "fused_layer_norm": lambda fn: functools.partial(fn, normalized_shape=4),
    "fused_rms_norm": lambda fn: functools.partial(fn, normalized_shape=4),
}


@pytest.mark.parametrize("name", NORMS)
def test_o1_leaves_what_is_normalized_as_it_is(amp: Any, name: str) -> None:
    module = importlib.import_module("apex.normalization.fused_layer_norm")
    norm = NORMS[name](getattr(module, name))
    expected = norm(LARGE)
    model = amp.initialize(Residual(norm), opt_level="O1", verbosity=0)
    model(LARGE)
    assert model.found.dtype == FLOAT
    assert torch.equal(model.found, expected)
    with torch.autocast("cpu", SHORT):
        assert norm(LARGE).dtype == SHORT, "outside of the model autocast is torch's"


@pytest.mark.parametrize(
    "other",
    [
        {"opt_level": "O0"},
        {"opt_level": "O1", "patch_torch_functions_type": HALF},
        {"opt_level": "O2"},
        {"enabled": False},
    ],
    ids=str,
)
def test_another_model_does_not_end_o1(amp: Any, other: dict[str, Any]) -> None:
    norm = torchfuse.normalization.FusedLayerNorm(4)
    o1 = {"opt_level": "O1", "patch_torch_functions_type": SHORT}
    model = amp.initialize(Residual(norm), verbosity=0, **o1)
    amp.initialize(make_model(), verbosity=0, **other)
    assert torch.equal(model(LARGE), norm(LARGE))


def test_o1_moves_to_another_process_with_its_model(amp: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torchfuse.normalization.FusedLayerNorm(4))
    amp.initialize(model, opt_level="O1", verbosity=0, patch_torch_functions_type=HALF)
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False); "
        "assert model(torch.tensor([[1e5, 2e5, 3e5, -1e5]])).isfinite().all()"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "model.pt"], check=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_o1_computes_once_more_has_the_same_dtype(amp: Any, reentrant: bool) -> None:
    """In the backward pass, which is outside of the model's forward pass."""
    norm = torchfuse.normalization.FusedLayerNorm(4)

    def checkpointed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=reentrant)

    model = amp.initialize(Residual(checkpointed), opt_level="O1", verbosity=0)
    x = LARGE.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    found = x.grad.clone()
    x.grad = None
    norm(x).sum().backward()
    assert torch.equal(found, x.grad)


def test_o1_in_a_compiled_block(amp: Any) -> None:
    norm = torchfuse.normalization.FusedLayerNorm(4)
    block = torch.compile(norm, backend="eager")
    block(LARGE)
    model = amp.initialize(Residual(block), opt_level="O1", verbosity=0)
    assert torch.equal(model(LARGE), norm(LARGE))


def test_forward_passes_of_many_threads_are_all_counted_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of DataParallel's replicas."""
    monkeypatch.setattr(_autocast, "_running", {})

    def pass_often(_: int) -> None:
        for _ in range(20_000):
            with _autocast.forward_under_o1(HALF):
                pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(pass_often, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert _autocast._running == {HALF: 0}
