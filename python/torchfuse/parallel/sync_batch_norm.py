# SPDX-License-Identifier: BSD-3-Clause
"""Batch normalization with statistics over the batches on all processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from torchfuse import _C
from torchfuse._transforms import is_symbolic, is_transformed, makes_program
from torchfuse.parallel import _repeated_forward
from torchfuse.parallel._ranks import require_name

# Values that must be equal on all ranks, as error messages name them. A number encodes the dtype.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_AGREED = ["num_features", "input.dtype (0 float32, 1 float16, 2 bfloat16, 3 float64)"]


class SyncBatchNorm(_BatchNorm):
    r"""Batch normalization with mean and variance over the batches on all processes.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \gamma + \beta

    over all dimensions except the second (Ioffe and Szegedy 2015), as `torch.nn.BatchNorm1d`,
    `BatchNorm2d` and `BatchNorm3d` compute on the combined batch, on the CPU and on CUDA. The state
    dict has the same keys as `nn.BatchNorm2d`'s.

    The forward pass and the backward pass each run one all-reduce, whose size does not depend on
    the number of processes. On CUDA, the host does not wait for the all-reduce. Batch sizes may
    differ between processes and may be 0. If all batch sizes are 0, the running statistics are not
    updated.

    In evaluation mode, or with one process, there is no communication, and no process group is
    needed. Gradients for `weight` and `bias` are computed from this process's outputs, and
    `DistributedDataParallel` averages these gradients. The layer can be differentiated twice. When
    activation checkpointing recomputes a forward pass, the running statistics are not updated
    again.

    Args:
        num_features (int): Number of channels C in an input ``[N, C, ...]``.
        eps (float, default 1e-5): Added to the variance.
        momentum (float | None, default 0.1): Weight of a new batch in the running statistics. None
            averages over all batches.
        affine (bool, default True): Create `weight` and `bias`.
        track_running_stats (bool, default True): Keep running statistics for evaluation. If False,
            evaluation uses the statistics of this process's batch.
        process_group (torch.distributed.ProcessGroup | None, default None): Processes that share
            statistics. None means the default group. All processes must run the same layers in the
            same order. With a separate group (see `own_communicator` in `convert_syncbn_model`),
            the layer does not wait for gradient communication. Pickles do not contain the group, so
            set `process_group` again on a loaded layer.
        channel_last (bool, default False): Inputs are ``[N, ..., C]``, as in apex. Inputs in the
            memory format `torch.channels_last` need no option and are processed in that format.
        fuse_relu (bool, default False): Apply ReLU to the output, in the same pass.
        bias (bool, default True): Create `bias`, as in torch 2.15.
        deterministic (bool, default False): Sum over processes in rank order, with a gather whose
            size grows with the number of processes.
        device (torch.device | str | None, default None): Device for parameters and buffers.
        dtype (torch.dtype | None, default None): Dtype for parameters and buffers: fp32, fp16, bf16
            or fp64. Statistics are summed in fp32 (fp64 for fp64 inputs) and combined in fp64.

    Raises:
        ValueError: If the input has fewer than two dimensions or a wrong number of channels, or if
            there is only one value per channel in training with one process.
        RuntimeError: If the input's dtype is not a real floating-point dtype; `z` differs from the
            input in size, dtype or device; the layer trains under `torch.func` transforms or
            forward-mode AD; or ranks differ in `num_features` or dtype. Also if a rank exited or
            timed out; the message contains this layer and the ranks that did not respond.

    Example:
        >>> import torch
        >>> from torchfuse.parallel import SyncBatchNorm
        >>> norm = SyncBatchNorm(3, fuse_relu=True)
        >>> x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> y = norm(x, torch.randn_like(x))
        >>> y.shape, bool((y >= 0).all()), y.is_contiguous(memory_format=torch.channels_last)
        (torch.Size([4, 3, 8, 8]), True, True)
    """

    _dropped_group = False  # whether pickling dropped a process group

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        *,
        bias: bool = True,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu
        self.deterministic = deterministic
        #: The layer's name in the model, for error messages; set by `convert_syncbn_model`.
        self.layer_name = ""
        self._agreed: tuple[str, torch.dtype] | None = None

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalizes the input, adds `z` if given, and applies ReLU with `fuse_relu`.

        Args:
            input (Tensor): ``[N, C, ...]``, or ``[N, ..., C]`` with `channel_last`; fp32, fp16,
                bf16 or fp64.
            z (Tensor | None, default None): Tensor with the input's shape, dtype and device, added
                before the ReLU.

        Returns:
            A tensor with the input's shape and dtype.
        """
        if self.channel_last:
            input = input.movedim(-1, 1)
            z = None if z is None else z.movedim(-1, 1)
        symbolic = is_symbolic(input)
        if not symbolic:
            self._check_input_dim(input)
        if symbolic or is_transformed(input, z, self.weight, self.bias):
            self._raise_for_training()
            return self._in_torch(input, z)
        batch_statistics = self.training or self.running_mean is None
        group = self._group_to_sync(input) if self.training else None
        if makes_program():
            if group is not None:
                self._raise_for_training()
            return self._in_torch(input, z)
        if batch_statistics and group is None and input.numel() == input.size(1):
            raise ValueError(
                f"{self._caller()}: expected more than 1 value per channel when training, "
                f"got input size {input.size()}"
            )
        observing = (
            self.training and self.track_running_stats and not _repeated_forward.is_repeated()
        )
        uses_running = observing or not batch_statistics
        output, packed = torch.ops.torchfuse.sync_batch_norm(
            input,
            self.weight,
            self.bias,
            self.running_mean if uses_running else None,
            self.running_var if uses_running else None,
            self.num_batches_tracked if observing else None,
            z,
            None if group is None else _repeated_forward.moments_of_first(self),
            training=batch_statistics,
            momentum=self.momentum,
            eps=self.eps,
            relu=self.fuse_relu,
            group=group,
            caller=self._caller(),
            deterministic=self.deterministic,
        )
        if group is not None:
            _repeated_forward.keep(self, packed)
        moved: Tensor = output.movedim(1, -1) if self.channel_last else output
        return moved

    def _raise_for_training(self) -> None:
        if self.training:
            raise RuntimeError(
                f"{self._caller()}: expected training to be False under torch.func's transforms, "
                "forward-mode differentiation and while a program is exported, got True. Call "
                "eval(), or compute derivatives with torch.autograd.grad."
            )

    def _in_torch(self, input: Tensor, z: Tensor | None) -> Tensor:
        """Runs the layer with torch's operators, which cannot communicate."""
        if is_symbolic(input):  # which a subclass's check of the input could not compare
            mean, var, momentum = self.running_mean, self.running_var, self.momentum or 0.0
            output = functional.batch_norm(
                input, mean, var, self.weight, self.bias, mean is None, momentum, self.eps
            )
        else:
            output = super().forward(input)
        if z is not None:
            output = output + z
        if self.fuse_relu:
            output = output.relu()
        return output.movedim(1, -1) if self.channel_last else output

    def reset_parameters(self) -> None:
        """Sets the running statistics, the weight and the bias to their initial values."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"{self._caller()}: expected at least 2D input (got {input.dim()}D input)"
            )
        if input.size(1) != self.num_features:
            place = "the last dimension" if self.channel_last else "dimension 1"
            raise ValueError(
                f"{self._caller()}: expected input to have num_features = {self.num_features} "
                f"channels in {place}, got {input.size(1)}."
            )

    def _caller(self) -> str:
        name = f" '{self.layer_name}'" if self.layer_name else ""
        return f"SyncBatchNorm{name}({self.num_features})"

    def _group_to_sync(self, input: Tensor) -> str | None:
        """Returns the group's name, or None if this process is alone."""
        if not dist.is_initialized():
            if self.process_group is not None:
                raise RuntimeError(
                    f"{self._caller()}: expected process_group to exist, got a group that was "
                    "destroyed. Create the layer's group again after init_process_group."
                )
            return None
        if self._dropped_group and self.process_group is None and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{self._caller()}: expected process_group to be set after the layer was loaded, "
                "got none, because files cannot contain process groups. Set layer.process_group = "
                "group on each layer that had a group."
            )
        group = self.process_group or dist.group.WORLD
        assert group is not None  # created by init_process_group
        if dist.get_rank(group) < 0:
            raise RuntimeError(
                f"{self._caller()}: expected process_group to contain this process, got a group "
                "without this process. Pass each process a group that contains the process."
            )
        if dist.get_world_size(group) == 1:
            return None
        if torch.compiler.is_compiling():
            return str(group.group_name)
        name = require_name(self._caller(), group)
        # Check once per group and dtype that ranks agree, because otherwise they could hang.
        if self._agreed != (name, input.dtype) and input.dtype in _DTYPES:
            values = [self.num_features, _DTYPES.index(input.dtype)]
            _C.check_same_in_all_ranks(_AGREED, values, input.device, name, self._caller())
            self._agreed = (name, input.dtype)
        return name

    def extra_repr(self) -> str:
        """Returns the arguments; options that torch's layer lacks are listed only if True."""
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        if self.affine and self.bias is None and "bias=" not in text:  # newer torch includes bias
            text += ", bias=False"
        for name in ("channel_last", "fuse_relu", "deterministic"):
            if getattr(self, name):
                text += f", {name}=True"
        return text

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickling, without the process group, which cannot be pickled."""
        state = dict(vars(self))
        if self.process_group is not None:
            state.update(process_group=None, _dropped_group=True)
        return state

    def __copy__(self) -> SyncBatchNorm:
        """Copies the layer with its process group."""
        result = type(self).__new__(type(self))
        vars(result).update(vars(self))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copies the layer, but shares the process group, which cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        return result
