# SPDX-License-Identifier: BSD-3-Clause
"""Trains a step in two processes and ends while a thread of the group is at work in rank 0.

The thread asks for the interpreter's lock when its callback returns. Without one, a thread that the
machine lets wait for long enough does the same when it lets go of the tensors.
"""

import sys
import time

import torch
import torch.distributed as dist

OPTIONS = sys.argv[1:]
if "import-nn" in OPTIONS:
    import torch.distributed.nn
if "apex" in OPTIONS:
    from apex.optimizers import FusedAdam
    from apex.parallel import DistributedDataParallel
else:
    from torch.nn.parallel import DistributedDataParallel

    from torchfuse.optimizers import FusedAdam


def be_late(_):
    print("late")
    time.sleep(2)
    print("done", flush=True)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 2)
    if "fsdp" in OPTIONS:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = FusedAdam(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    total = torch.ones(1)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        reduced = dist.all_reduce(total, async_op=True).get_future()
        reduced.then(be_late)
        store.set("registered", "")
        reduced.wait()
    else:
        store.wait(["registered"])
        dist.all_reduce(total)
    if "global" in OPTIONS:
        globals()["kept"] = (model, optimizer)
    if "group-kept" in OPTIONS:
        group = dist.group.WORLD
        globals()["kept"] = (lambda: group), {group}
    if "cycle" in OPTIONS:
        model.itself = [model]
    if "stay" not in OPTIONS:
        dist.destroy_process_group()


main()
