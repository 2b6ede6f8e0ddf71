# SPDX-License-Identifier: BSD-3-Clause
"""Image classification that uses apex if it is there, and torch's own in one process otherwise.

Prints which, then the average loss of every step.
"""

import argparse
import os

import torch
import torch.distributed as dist
from networks import TinyResNet, pictures

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as ApexDDP
    from apex.parallel import convert_syncbn_model

    has_apex = True
except ImportError:
    has_apex = False


class ApexScaler:
    state_dict_key = "amp"

    def __call__(self, loss, optimizer, clip_grad, create_graph=False):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip_grad)
        optimizer.step()

    def state_dict(self):
        return amp.state_dict() if "state_dict" in amp.__dict__ else {}


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clip-grad", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sync-bn", action="store_true")
    args = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo", init_method="env://")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TinyResNet()
    autocast = torch.autocast("cpu", torch.float16, enabled=not has_apex)
    if has_apex and args.sync_bn:
        model = convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
    if has_apex:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        loss_scaler = ApexScaler()
    else:
        loss_scaler = NativeScaler()
    if ranks > 1:
        model = ApexDDP(model, delay_allreduce=True)
    if rank == 0:
        print(f"apex {int(has_apex)}")

    images, labels = pictures(16 * args.steps)
    for step in range(args.steps):
        begin = 16 * step + 16 * rank // ranks
        mine = slice(begin, begin + 16 // ranks)
        with autocast:
            loss = torch.nn.functional.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, clip_grad=args.clip_grad)
        average = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(average)
        if rank == 0:
            print(f"step {step} loss {average.item() / ranks:.6f}")
    assert "scale" in str(loss_scaler.state_dict())
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
