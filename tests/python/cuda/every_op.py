# SPDX-License-Identifier: BSD-3-Clause
"""A call of each operator, the same on every device.

As a program it captures one call, named by its argument, in a graph before the process has called
any operator, and compares a replay with the CPU:

    python tests/python/cuda/every_op.py fused_adam_
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import torchfuse
from torchfuse.optimizers.hyper_params import table
from torchfuse.testing import OPTIM_SPECS, OptimSpec

Call = Callable[[], Sequence[Tensor]]

SHAPES = ((5, 3), (2000,), (1,), (4, 2, 6))
#: For the optimizers that have them.
OPTIONS = {
    "lr": 0.0,  # the tensor counts
    "betas": (0.9, 0.999),
    "momentum": 0.9,
    "dampening": 0.1,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "trust_coefficient": 0.01,
    "lr_decay": 0.1,
    "ns_dtype": torch.float32,  # the default is another one on every device
}
RULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
OPS = torch.ops.torchfuse


def _normal(device: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _optimizer(spec: OptimSpec, device: str) -> Call:
    """Once for each group into which the class divides parameters of all shapes."""
    known = inspect.signature(spec.optimizer).parameters
    options = {key: value for key, value in OPTIONS.items() if key in known}
    optimizer = spec.optimizer([_normal(device, *shape) for shape in SHAPES], **options)
    rate = torch.tensor(0.01, dtype=torch.float64, device=device)
    calls: list[tuple[list[list[Tensor]], dict[str, float]]] = []
    for index, group in enumerate(optimizer.param_groups):
        params = group["params"]
        grads = [_normal(device, *param.shape, seed=1) for param in params]
        states: list[list[Tensor]] = []
        for state in torchfuse._C.FusedStep(spec.algorithm).state_names:
            like = params if state in optimizer._state_names(group) else []
            if state == "exp_avg_norm":
                states.append([torch.ones((), device=device) for _ in like])
            else:
                states.append([param.square() for param in like])
        steps = list(torch.ones(len(params), device=device).unbind())
        values = optimizer._hyper_params(index, group)
        keywords = {
            info.name: bool(value) if info.is_flag else float(value)
            for info, value in zip(table(spec.algorithm), values, strict=True)
        }
        calls.append(([params, grads, *states, steps, []], keywords))

    def call() -> Sequence[Tensor]:
        for lists, keywords in calls:
            getattr(OPS, spec.op)(*lists, **keywords, lr_tensor=rate)
        return [tensor for lists, _ in calls for tensors in lists for tensor in tensors]

    return call


def _unscale(device: str) -> Call:
    tensors = [_normal(device, *shape) for shape in SHAPES]
    found_inf, half = torch.zeros((), device=device), torch.full((), 0.5, device=device)

    def call() -> Sequence[Tensor]:
        OPS.multi_tensor_unscale_(tensors, found_inf, half)
        return [*tensors, found_inf]

    return call


def _norm(device: str) -> Call:
    tensors = [_normal(device, *shape) for shape in SHAPES]
    return lambda: OPS.multi_tensor_l2_norm(tensors)  # type: ignore[no-any-return]


def _update_scale(device: str) -> Call:
    scale, found_inf = torch.full((), 8.0, device=device), torch.ones((), device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)

    def call() -> Sequence[Tensor]:
        OPS.amp_update_scale_(scale, tracker, found_inf, **RULE)
        return [scale, tracker]

    return call


def _with_gradients(forward: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor) -> Call:
    for leaf in leaves:
        leaf.requires_grad_()

    def call() -> Sequence[Tensor]:
        y = forward()
        return [y, *torch.autograd.grad(y, leaves, grad)]

    return call


def _layer_norm(device: str) -> Call:
    x, grad = (_normal(device, 4, 5, 6, seed=i) for i in range(2))
    weight, bias = torch.ones(5, 6, device=device), torch.zeros(5, 6, device=device)
    forward = partial(OPS.layer_norm, x, 2, weight, bias, eps=1e-5)
    return _with_gradients(forward, [x, weight, bias], grad)


def _batch_norm(device: str) -> Call:
    x, grad = (_normal(device, 4, 8, 5, 5, seed=i) for i in range(2))
    weight, bias = torch.ones(8, device=device), torch.zeros(8, device=device)
    running = [torch.zeros(8, device=device), torch.ones(8, device=device), None]
    options = {"training": True, "momentum": 0.1, "eps": 1e-5}

    def forward() -> Tensor:
        return OPS.sync_batch_norm(x, weight, bias, *running, **options)[0]

    return _with_gradients(forward, [x, weight, bias], grad)


def _cross_entropy(device: str) -> Call:
    logits, grad = _normal(device, 4, 700), _normal(device, 4)
    labels = torch.tensor([0, 699, 3, 5], device=device)
    forward = partial(OPS.softmax_cross_entropy, logits, labels, smoothing=0.1)
    return _with_gradients(forward, [logits], grad)


#: Makes the arguments on a device; the call makes results of them. `layer_norm`, `sync_batch_norm`
#: and `softmax_cross_entropy` call the operators that they consist of, forward and backward.
CALLS: dict[str, Callable[[str], Call]] = {
    **{spec.op: partial(_optimizer, spec) for spec in OPTIM_SPECS},
    "multi_tensor_unscale_": _unscale,
    "multi_tensor_l2_norm": _norm,
    "amp_update_scale_": _update_scale,
    "layer_norm": _layer_norm,
    "sync_batch_norm": _batch_norm,
    "softmax_cross_entropy": _cross_entropy,
}


def assert_as_on_the_cpu(name: str, results: Sequence[Tensor]) -> None:
    """Sums are taken in another order: the results are close, and no more."""
    expected = CALLS[name]("cpu")()
    actual = [result.detach().cpu() for result in results]
    torch.testing.assert_close(actual, [e.detach() for e in expected], rtol=1e-5, atol=1e-6)


def main(name: str) -> None:
    """The program."""
    call = CALLS[name]("cuda")
    graph = torch.cuda.CUDAGraph()
    # On this thread: where a process ends right behind a backward pass, torch's thread for the
    # device may still let go of Python objects, which ends some processes by std::terminate.
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.graph(graph):
        results = call()
    graph.replay()
    torch.cuda.synchronize()
    assert_as_on_the_cpu(name, results)


if __name__ == "__main__":
    main(sys.argv[1])
