# SPDX-License-Identifier: BSD-3-Clause
"""`initialize`: prepares models and optimizers for an optimization level."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from torchfuse.apex.amp.loss_scaler import LossScaler
from torchfuse.apex.amp.models import (
    ForwardCasts,
    add_casts,
    check_models,
    convert_all,
    convert_network,
    save_in_fp32,
)
from torchfuse.apex.amp.optimizers import check_optimizers, prepare_optimizer
from torchfuse.apex.amp.options import Properties, chosen_options
from torchfuse.apex.amp.state import Handle, _amp_state, maybe_print


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Prepares models and optimizers for mixed precision, in place.

    * O0: fp32 parameters, inputs and outputs. The loss scale is 1.
    * O1: fp32 parameters. The forward pass runs under `torch.autocast` in fp16, and 16-bit outputs
      are cast to fp32. The loss scale is dynamic.
    * O2: fp16 parameters with fp32 masters, but fp32 batch normalization. Inputs are cast to fp16
      and outputs to fp32. The loss scale is dynamic.
    * O3: fp16 parameters without masters. Inputs are cast to fp16 and outputs to fp32. The loss
      scale is 1.

    For bf16 instead of fp16, pass `patch_torch_functions_type=torch.bfloat16` with O1, or
    `cast_model_type=torch.bfloat16` with O2 and O3. The default loss scale is then 1.

    Models may be on the CPU or an accelerator. Call this function before wrapping a model in
    `DistributedDataParallel` or `DataParallel`. Further calls with other optimizers are allowed;
    each call replaces the loss scales. After an error, nothing has changed.

    Args:
        models (Module | list[Module]): Models with fp32 parameters.
        optimizers (Optimizer | list[Optimizer] | None, default None): Optimizers of the models.
        enabled (bool, default True): If False, nothing changes and `scale_loss` yields the loss
            unscaled.
        opt_level (str, default 'O1'): "O0", "O1", "O2" or "O3", with the letter O.
        cast_model_type (dtype | None): Dtype of parameters and inputs. None: the level's dtype.
        patch_torch_functions (bool | None): Run forward passes under autocast. None: as the level.
        keep_batchnorm_fp32 (bool | str | None): Keep batch normalization with parameters in fp32;
            also accepts "True" and "False". None: as the level.
        master_weights (bool | None): Keep fp32 masters of 16-bit parameters. None: as the level.
        loss_scale (float | str | None): "dynamic" or a number, also as a string. None: as the
            level.
        cast_model_outputs (dtype | None): Dtype of the models' floating-point outputs. None: fp32
            as listed above.
        num_losses (int, default 1): Number of loss scalers; see `scale_loss(loss_id=...)`.
        verbosity (int, default 1): 0 prints nothing.
        min_loss_scale (float | None): Minimum of a dynamic loss scale. None: 2**-24.
        max_loss_scale (float, default 2**24): Maximum of a dynamic loss scale.
        patch_torch_functions_type (dtype | None): O1's autocast dtype, torch.float16 or
            torch.bfloat16. None: torch.float16.

    Returns:
        The models, or a tuple of models and optimizers if `optimizers` is not None. Each is a list
        if the argument was a list.

    Raises:
        RuntimeError: for an unknown level, an option that the level excludes, a model with 16-bit
            or fp64 parameters or in a wrapper, or an optimizer that was passed before.
        TypeError: for an argument that is not a model or an optimizer, naming the index, and for an
            `enabled` that is not a bool.
        ValueError: for an invalid option value, and for an optimizer whose gradients are sharded
            over processes.

    Example:
        >>> import torch
        >>> from torchfuse.apex import amp
        >>> from torchfuse.optimizers import FusedAdam
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedAdam(model.parameters())
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
        (torch.float16, torch.float32)
    """
    _check_enabled(enabled)
    if not enabled:
        _amp_state.opt_properties = Properties()
        _amp_state.loss_scalers = []
        _amp_state.handle = Handle()
        return models if optimizers is None else (models, optimizers)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "patch_torch_functions_type": patch_torch_functions_type,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    properties = chosen_options(opt_level, overrides)
    model_list = _as_list("models", models, torch.nn.Module)
    optimizer_list = _as_list("optimizers", optimizers, torch.optim.Optimizer)
    check_models(model_list)
    check_optimizers(optimizer_list)
    _check_outputs_and_count(cast_model_outputs, num_losses)
    bounds: dict[str, Any] = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale}
    scalers = [LossScaler(properties.loss_scale, **bounds) for _ in range(num_losses)]
    # All checks are above this line, so that nothing has changed after an error.
    _amp_state.verbosity = verbosity
    _amp_state.min_loss_scale = min_loss_scale
    _amp_state.max_loss_scale = max_loss_scale
    _amp_state.opt_properties = properties
    _amp_state.loss_scalers = scalers
    dtype = properties.patch_torch_functions_type or torch.float16
    autocast = dtype if properties.patch_torch_functions else None
    _amp_state.handle = Handle(autocast)
    _print_options(properties, overrides)
    _warn_of_unknown_params(model_list, optimizer_list)
    for model in model_list:
        _prepare_model(model, properties, autocast, cast_model_outputs)
    for optimizer in optimizer_list:
        is_dynamic = properties.loss_scale == "dynamic"
        prepare_optimizer(optimizer, bool(properties.master_weights), is_dynamic)
    return models if optimizers is None else (models, optimizers)


def _check_enabled(enabled: Any) -> None:
    if enabled is not None and (isinstance(enabled, str) or enabled not in (True, False)):
        raise TypeError(
            f"amp.initialize: expected enabled to be a bool, got {enabled!r}. Pass a level by "
            f"name: opt_level={enabled!r}."
        )


def _as_list(name: str, value: Any, kind: type) -> list[Any]:
    if isinstance(value, list):
        return value
    if value is None and name == "optimizers":
        return []
    if not isinstance(value, kind) and isinstance(value, tuple | dict | set):
        raise TypeError(
            f"amp.initialize: expected {name} to be one object or a list, got "
            f"{type(value).__name__}. Pass list(...)."
        )
    return [value]


def _check_outputs_and_count(dtype: Any, num_losses: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"amp.initialize: expected cast_model_outputs to be a floating-point dtype, got "
            f"{dtype!r}."
        )
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(
            f"amp.initialize: expected num_losses to be an int of at least 1, got {num_losses!r}."
        )


def _warn_of_unknown_params(models: list[torch.nn.Module], optimizers: list[Any]) -> None:
    """Warns if an optimizer holds a copied model's parameters, and so would not train the model."""
    known = {id(param) for model in models for param in model.parameters()}
    shapes = [[param.shape for param in model.parameters()] for model in models]
    for index, optimizer in enumerate(optimizers):
        own = [param for group in optimizer.param_groups for param in group["params"]]
        is_copy = [param.shape for param in own] in shapes and own
        if is_copy and known.isdisjoint(map(id, own)):
            warnings.warn(
                f"amp.initialize: expected optimizers[{index}] to have parameters of the models, "
                f"got a {type(optimizer).__name__} without any. Construct the optimizer from "
                "model.parameters() after the model was last copied.",
                stacklevel=3,
            )


def _prepare_model(
    model: torch.nn.Module,
    properties: Properties,
    autocast: torch.dtype | None,
    outputs: torch.dtype | None,
) -> None:
    dtype = properties.cast_model_type
    if dtype is not None:
        (convert_network if properties.keep_batchnorm_fp32 else convert_all)(model, dtype)
        outputs = outputs or torch.float32
    add_casts(model, ForwardCasts(inputs=dtype, autocast=autocast, outputs=outputs))
    if dtype not in (None, torch.float32):
        save_in_fp32(model)


def _print_options(properties: Properties, overrides: Mapping[str, Any]) -> None:
    lines = [f"apex.amp by torchfuse: opt_level {properties.opt_level}"]
    for name, value in properties.options.items():
        origin = "" if overrides.get(name) is None else "  (set by the program)"
        lines.append(f"  {name:27}: {value}{origin}")
    maybe_print("\n".join(lines), rank0=True)
