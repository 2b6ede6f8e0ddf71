# SPDX-License-Identifier: BSD-3-Clause
"""Trains a language model that processes share: FSDP2 x tensor parallelism, or ZeRO.

Example:
    python examples/python/sharded_lm.py --out build/sharded/one
    torchrun --nproc-per-node 2 examples/python/sharded_lm.py --out build/sharded/two \
        --stop-after 120
    torchrun --nproc-per-node 4 examples/python/sharded_lm.py --out build/sharded/two --resume \
        --tensor-parallel 2 --stop-after 160
    torchrun --nproc-per-node 2 examples/python/sharded_lm.py --out build/sharded/two --resume \
        --parallel zero
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \
        --max-restarts 3 examples/python/sharded_lm.py --out build/sharded/restarted \
        --resume-or-begin --checkpoint-every 20

The tokens are the bytes of Python's standard library. Parameters are bf16 with the 16 bits that
they lack of fp32 masters in the optimizer, or fp32 (--precision). Alone, and in every layout of
processes, the losses are those of the same batches, up to rounding, and those of the C++ program
examples/cpp/sharded_lm, which has ZeRO alone. Checkpoints are written by
torch.distributed.checkpoint and know no layout: each resumes in any other. Rank 0 writes
<out>/log.jsonl, which has a line per step, and the curve <out>/loss.svg. A run that dies at any
moment leaves its last checkpoint and the log up to it, and with --resume-or-begin torchrun's
restarts go on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import sharded_lm_report
from sharded_lm_arguments import (
    checkpoint_of,
    last_checkpoint,
    model_file,
    model_of,
    parse_arguments,
)
from sharded_lm_data import VOCABULARY, Corpus
from sharded_lm_model import LanguageModel, shard, split_layers
from sharded_lm_zero import create_states, load_own_state, own_state
from torchfuse.losses import softmax_cross_entropy
from torchfuse.optimizers import FusedAdam

SEED = 0
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0}
# The masters that a bf16 model needs, in 16 bits for each parameter instead of 32.
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "fp32": (torch.float32, {}),
}


@dataclass
class Processes:
    """The processes and what of a batch this one has: those of a tensor group have the same."""

    rank: int
    ranks: int
    tensor: int
    device: torch.device

    def part_of(self, batch: Tensor) -> Tensor:
        """This process's part of a batch's samples."""
        return batch.chunk(self.ranks // self.tensor)[self.rank // self.tensor].to(self.device)

    def sum(self, value: Tensor | float) -> float:
        """The sum over all processes; all of them call it."""
        value = torch.as_tensor(value, device=self.device).detach().clone()
        if self.ranks > 1:
            dist.all_reduce(value)
        return float(value)

    def mean(self, value: Tensor) -> float:
        """The mean over all processes; all of them call it."""
        return self.sum(value) / self.ranks


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy in nats per token, in fp32."""
    losses = softmax_cross_entropy(logits.flatten(0, 1), following.flatten(), dtype=torch.float32)
    return losses.mean()


class Trainer:
    """A process's part of the model, of the optimizer and of the schedule."""

    def __init__(self, arguments: argparse.Namespace, processes: Processes) -> None:
        self.processes, self.accumulate = processes, arguments.accumulate
        dtype, masters = PRECISIONS[arguments.precision]
        torch.manual_seed(SEED)  # the same model in all processes
        self.model = LanguageModel(
            VOCABULARY, arguments.sequence, arguments.width, arguments.layers, arguments.heads
        ).to(processes.device, dtype)
        self.forward: nn.Module = self.model
        self.layout = "1 process"
        if processes.ranks > 1 and arguments.parallel == "fsdp":
            data, tensor = processes.ranks // processes.tensor, processes.tensor
            mesh = init_device_mesh(
                processes.device.type, (data, tensor), mesh_dim_names=("data", "tensor")
            )
            if tensor > 1:
                split_layers(self.model, mesh["tensor"])
            shard(self.model, mesh["data"])
            self.layout = f"FSDP {data} x TP {tensor}"
        options = {"lr": arguments.lr, **ADAM, **masters}
        self.optimizer: FusedAdam | ZeroRedundancyOptimizer
        if processes.ranks > 1 and arguments.parallel == "zero":
            self.forward = DistributedDataParallel(self.model)
            # The ranks update different parameters: with norm_groups they clip by one norm.
            world = dist.group.WORLD
            assert world is not None  # the process has joined
            local: Any = partial(FusedAdam, norm_groups=[world], **options)
            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), local)
            self.layout = f"ZeRO of {processes.ranks}"
        else:
            self.optimizer = FusedAdam(self.model.parameters(), **options)

        warm_up: int = arguments.warm_up
        falling: int = max(1, arguments.steps - warm_up)

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            done = (step - warm_up) / falling
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))  # to a tenth

        self.scheduler = LambdaLR(self.optimizer, factor)

    def step(self, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        """One step of all processes; returns what the log says of it."""
        tokens, following = map(self.processes.part_of, batch)
        total = torch.zeros((), device=self.processes.device)
        for part in range(self.accumulate):
            is_last = part + 1 == self.accumulate
            # Gradients are reduced once a step, with the last part.
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(is_last)
            ddp = self.forward if isinstance(self.forward, DistributedDataParallel) else None
            with ddp.no_sync() if ddp and not is_last else nullcontext():
                logits = self.forward(tokens.chunk(self.accumulate)[part])
                loss = loss_of(logits, following.chunk(self.accumulate)[part]) / self.accumulate
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        norm = self.fused.grad_norm()
        assert norm is not None  # it clips
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step()
        return {"loss": self.processes.mean(total), "lr": lr, "grad_norm": float(norm)}

    @property
    def fused(self) -> FusedAdam:
        """The optimizer of this process's parameters."""
        if isinstance(self.optimizer, FusedAdam):
            return self.optimizer
        local: FusedAdam = self.optimizer.optim
        return local

    @torch.no_grad()
    def validation_loss(self, batch: tuple[Tensor, Tensor]) -> float:
        """The mean over the batch; all processes call it."""
        tokens, following = map(self.processes.part_of, batch)
        return self.processes.mean(loss_of(self.model(tokens), following))

    def state(self) -> dict[str, Any]:
        """What a checkpoint has, under the same names and in whole shapes in every layout."""
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            optimizer = own_state(self.optimizer)
        else:
            optimizer = self.optimizer.state_dict()
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
        }

    def save(self, folder: Path) -> None:
        """Writes a checkpoint; all processes call it."""
        save(self.state(), checkpoint_id=folder, no_dist=self.processes.ranks == 1)

    def load(self, folder: Path) -> None:
        """Reads a checkpoint of any layout; all processes call it."""
        # Creates the states to read into.
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            create_states(self.optimizer)
        else:
            get_optimizer_state_dict(self.model, self.optimizer)
        state = self.state()
        # Into the memory of the parameters and states themselves; the rest comes back in `state`.
        load(state, checkpoint_id=folder, no_dist=self.processes.ranks == 1)
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            load_own_state(self.optimizer, state["optimizer"])
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def common_begin(arguments: argparse.Namespace, processes: Processes) -> int:
    """The step after which all processes go on. Rank 0 reads it: a folder may show others less."""
    path = model_file(arguments.out)
    begin = last_checkpoint(arguments.out) if processes.rank == 0 else 0
    if processes.rank == 0 and begin == 0:
        path.write_text(json.dumps(model_of(arguments)), encoding="utf-8")
    begin = round(processes.sum(begin))
    seeing = round(processes.sum(int(path.exists())))
    if seeing < processes.ranks:
        raise SystemExit(
            f"expected --out to be one folder for all {processes.ranks} processes, got {path} of "
            f"rank 0 in {seeing} of them"
        )
    return begin


def train(arguments: argparse.Namespace, processes: Processes) -> None:
    """Trains, and writes the log, the checkpoints and the curve."""
    corpus = Corpus(arguments.sequence, SEED)
    tested = corpus.validation_batch(arguments.validation_samples)
    trainer = Trainer(arguments, processes)
    begin = common_begin(arguments, processes)
    if begin:
        trainer.load(checkpoint_of(arguments.out, begin))
    end = min(arguments.stop_after or arguments.steps, arguments.steps)
    if begin >= end and not arguments.resume_or_begin:
        raise SystemExit(f"{arguments.out} has {begin} steps already, and {end} are asked for")
    path = arguments.out / "log.jsonl"
    log = sharded_lm_report.Log(path, begin) if processes.rank == 0 else None
    bar = tqdm(
        total=end, initial=begin, desc=trainer.layout, disable=None if log is not None else True
    )

    def record(**values: Any) -> None:
        if log is not None:
            log.write({"layout": trainer.layout, **values})

    if begin == 0:
        record(step=0, validation_loss=trainer.validation_loss(tested))
    tokens = arguments.batch * arguments.sequence
    for step in range(begin + 1, end + 1):
        start = time.perf_counter()
        measured = trainer.step(corpus.batch(step, arguments.batch))
        speed = tokens / (time.perf_counter() - start)
        record(step=step, **measured, tokens_per_second=round(speed, 1))
        bar.set_postfix_str(f"loss {measured['loss']:.3f}, {speed:,.0f} tokens/s")
        bar.update()
        if step % arguments.validate_every == 0 or step == end:
            record(step=step, validation_loss=trainer.validation_loss(tested))
        if step % arguments.checkpoint_every == 0 or step == end:
            if log is not None:
                log.sync()  # what a checkpoint counts, the log has
            trainer.save(checkpoint_of(arguments.out, step))
    bar.close()
    if log is not None:
        log.close()
        sharded_lm_report.draw(path, arguments.out / "loss.svg")
        print(sharded_lm_report.summary(path))


def main() -> None:
    """Runs alone, or as torchrun started it."""
    arguments = parse_arguments(__doc__, tuple(PRECISIONS))
    arguments.out.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        # torch warns that it saves and loads in one process, as it is told to.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        train(arguments, Processes(0, 1, 1, device))
        return
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        ranks = dist.get_world_size()
        train(arguments, Processes(dist.get_rank(), ranks, arguments.tensor_parallel, device))
        # A process that is done early would close connections which others still use.
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
