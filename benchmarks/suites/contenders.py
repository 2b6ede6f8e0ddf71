# SPDX-License-Identifier: BSD-3-Clause
"""The training steps that are compared: torchfuse's and torch's, on equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from suites.parameters import ParameterSet
from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam, FusedLAMB

OURS = "torchfuse"
OURS_FROM_THE_END = "torchfuse, update from the end"
OUR_LAMB = "torchfuse LAMB"
FUSED = "torch fused"
FOREACH = "torch foreach"
DEFAULT = "torch default"  # AdamW() as written: a loop over the tensors on a CPU
AGAIN = "torch fused, again"
_OF_TORCHFUSE = (OURS, OURS_FROM_THE_END, OUR_LAMB)

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SCALE = 65536.0


def _fp64_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    squares = [tensor.double().square().sum() for tensor in tensors]
    return torch.stack(squares).sum().sqrt()


def _make_optimizer(
    name: str, params: list[torch.Tensor], max_norm: float | None
) -> torch.optim.Optimizer:
    if name in (OURS, OURS_FROM_THE_END):
        dtype = params[0].dtype
        optimizer = FusedAdam(
            params,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=max_norm,
            # torch keeps the moments of a bf16 parameter in bf16; so do we here.
            state_dtype=dtype if dtype == torch.bfloat16 else None,
        )
        optimizer._update_from_the_end = name == OURS_FROM_THE_END
        return optimizer
    if name == OUR_LAMB:
        return FusedLAMB(params, lr=LEARNING_RATE, max_grad_norm=max_norm)
    return torch.optim.AdamW(
        params,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True if name == FUSED else None,
        foreach=True if name == FOREACH else None,
    )


def scaled_step(
    scaler: TorchGradScaler,
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.Tensor],
    max_norm: float | None,
) -> None:
    """Unscaling and clipping as users of torch write them, if there is a limit; a scaled step."""
    if max_norm is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(optimizer)
    scaler.update()


class Contender:
    """One optimizer with parameters, gradients and, in the scaled pipeline, a loss scaler.

    Timed steps run at a loss scale of 1 and a norm below the clip: torch's pipeline rescales its
    gradients in place and would feed itself ever smaller numbers. The work is the same.
    """

    def __init__(
        self,
        name: str,
        parameters: ParameterSet,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        scale_and_clip: bool = False,
    ) -> None:
        """Builds equal tensors for equal arguments."""
        self.name = name
        self._parameters = parameters
        self._device = device
        self._grad_seed = seed + 1
        self.params = [
            torch.nn.Parameter(values.mul_(0.1)) for values in parameters.randn(dtype, device, seed)
        ]
        for param, grad in zip(
            self.params, parameters.randn(dtype, device, self._grad_seed), strict=True
        ):
            param.grad = grad
        # The norm of standard normal gradients is close to sqrt(numel), whatever the seed.
        self._max_norm = float(parameters.numel) ** 0.5 if scale_and_clip else None
        self.optimizer = _make_optimizer(name, list(self.params), self._max_norm)
        self.scaler: TorchGradScaler | None = None
        if scale_and_clip:
            scaler_type = GradScaler if name in _OF_TORCHFUSE else TorchGradScaler
            self.scaler = scaler_type(device.type, init_scale=SCALE)
            self.scaler.scale(torch.zeros((), device=device))

    def fill_grads(self, factor: float) -> None:
        """Writes the seed's gradients times `factor`; zero for sets without gradients."""
        generator = torch.Generator(self._device).manual_seed(self._grad_seed)
        for param in self.params:
            assert param.grad is not None
            param.grad.normal_(generator=generator)
            param.grad.mul_(0.0 if self._parameters.zero_grads else factor)

    def step(self, exact_norm: bool = False) -> None:
        """One step of the pipeline under test.

        Args:
            exact_norm: let torch clip by a norm computed in fp64. Its own, in fp32, is 0.5 % off
                for one tensor of 2^26 elements: too far to verify anything with.
        """
        if self.scaler is None:
            self.optimizer.step()
            return
        if self.name not in _OF_TORCHFUSE:
            assert self._max_norm is not None
            self.scaler.unscale_(self.optimizer)
            if exact_norm:
                norm = _fp64_norm([param.grad for param in self.params if param.grad is not None])
                torch.nn.utils.clip_grads_with_norm_(self.params, self._max_norm, norm)
            else:
                torch.nn.utils.clip_grad_norm_(self.params, self._max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run_verification_steps(self, count: int) -> None:
        """Steps with a real loss scale and with clipping at work."""
        for _ in range(count):
            self.fill_grads(1.0 if self.scaler is None else 2.0 * SCALE)
            self.step(exact_norm=True)

    def means(self) -> list[torch.Tensor]:
        """Adam's first moments, after a step."""
        return [self.optimizer.state[param]["exp_avg"] for param in self.params]

    def prepare_timing(self) -> None:
        """Puts gradients, scale and moments into the state in which steps are timed."""
        self.fill_grads(1.0 if self.scaler is None else 0.5)
        if self.scaler is not None:
            self.scaler.update(1.0)
        for param in self.params:
            for key, value in self._parameters.moments.items():
                self.optimizer.state[param][key].fill_(value)


# Largest relative difference in norm, per tensor: of the parameters, and of the first moments.
# torch rounds to bf16 after every operation.
TOLERANCES = {
    torch.float32: (5e-6, 5e-6),
    torch.bfloat16: (1e-2, 2e-2),
    torch.float64: (1e-13, 1e-13),
}


def largest_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Of all pairs, relative, in norm; NaN if one is. Waits once for a device."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        exact = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        return tensor.detach().to(exact)

    pairs = zip(actual, expected, strict=True)
    errors = torch.stack([(wide(found) - wide(right)).norm() for found, right in pairs])
    norms = torch.stack([wide(right).norm() for right in expected])
    return float(torch.where(errors == 0, errors, errors / norms).max())


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in norm."""
    return largest_difference([actual], [expected])


def verify(contenders: list[Contender], dtype: torch.dtype) -> dict[str, float]:
    """Compares every contender with torch's fused optimizer after three steps.

    Returns:
        The largest difference of parameters and of first moments.

    Raises:
        RuntimeError: A contender computes something else, so that timing it would be void.
    """
    for contender in contenders:
        contender.run_verification_steps(3)
    reference = next(contender for contender in contenders if contender.name == FUSED)
    largest = {"params": 0.0, "exp_avg": 0.0}
    for contender in contenders:
        differences = {
            "params": largest_difference(contender.params, reference.params),
            "exp_avg": largest_difference(contender.means(), reference.means()),
        }
        for (key, value), limit in zip(differences.items(), TOLERANCES[dtype], strict=True):
            if not value <= limit:
                raise RuntimeError(
                    f"{contender.name}: expected {key} within {limit:g} of {FUSED}, got {value:g}"
                )
            largest[key] = max(largest[key], value)
    return largest


def norm_functions(
    parameters: ParameterSet, device: torch.device, seed: int
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """The norm-and-check op against torch's norm, on the same gradients; verified against fp64."""
    grads = parameters.randn(torch.float32, device, seed)
    functions: dict[str, Callable[[], object]] = {
        OURS: lambda: torch.ops.torchfuse.multi_tensor_l2_norm(grads),
        "get_total_norm": lambda: torch.nn.utils.get_total_norm(grads),
    }
    expected = float(_fp64_norm(grads))
    norm, found_inf = torch.ops.torchfuse.multi_tensor_l2_norm(grads)
    error = abs(float(norm) / expected - 1)
    if not error <= 1e-6 or float(found_inf) != 0:
        raise RuntimeError(
            f"multi_tensor_l2_norm: expected {expected:.9g} and found_inf 0, "
            f"got {float(norm):.9g} and {float(found_inf):g}"
        )
    torch_error = abs(float(torch.nn.utils.get_total_norm(grads)) / expected - 1)
    return functions, {"norm": error, "norm of torch": torch_error}
