# SPDX-License-Identifier: BSD-3-Clause
"""A data-parallel training program written for apex: it imports nothing of torchfuse."""

import argparse

import torch
import torch.distributed as dist
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import Reducer
from apex.parallel.distributed import flat_dist_call


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", action="store_true")
    parser.add_argument("--reducer", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    if args.reducer:
        reducer = Reducer(model)
    else:
        model = DDP(model, message_size=250000000, delay_allreduce=args.delay)
    optimizer = FusedAdam(model.parameters(), lr=0.02)

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 8, generator=generator)
    targets = inputs.sin().sum(1, keepdim=True)
    mine = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        if args.reducer:
            reducer.reduce()
        optimizer.step()
        average = loss.detach().clone()
        flat_dist_call([average], dist.all_reduce)
        if rank == 0:
            print(f"{average.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
