# SPDX-License-Identifier: BSD-3-Clause
"""Data-parallel training of a small ResNet for apex: O2, synchronized statistics, LARC, warmup.

Prints the average loss of every step, and the loss scale after it.
"""

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model
from apex.parallel.distributed import flat_dist_call
from apex.parallel.LARC import LARC
from networks import TinyResNet, pictures

LR, STEPS = 0.5, 20


def adjust_learning_rate(optimizer, step, warmup=5):
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (step + 1) / warmup)


def main():
    dist.init_process_group("gloo", init_method="env://")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = convert_syncbn_model(TinyResNet())
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9, weight_decay=1e-3)
    optimizer = LARC(optimizer, trust_coefficient=0.1, clip=False)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32="True")
    model = DDP(model)
    criterion = torch.nn.CrossEntropyLoss()

    images, labels = pictures(16 * STEPS)
    model.train()
    for step in range(STEPS):
        begin = 16 * step + 16 * rank // ranks
        mine = slice(begin, begin + 16 // ranks)
        adjust_learning_rate(optimizer, step)
        loss = criterion(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        average = loss.detach().clone()
        flat_dist_call([average], dist.all_reduce)
        scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
        if rank == 0:
            print(f"step {step} loss {average.item():.6f} scale {scale}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
