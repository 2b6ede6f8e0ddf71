# SPDX-License-Identifier: BSD-3-Clause
"""fp16 training with an Adam of its own on top of apex's, as fairseq has it.

Either the optimizer has the fp16 parameters, or their fp32 masters in one flat tensor. Prints the
loss and the norm of the gradients of every step.
"""

import argparse

import torch
from networks import TinyBert, bert_loss, sentences

try:
    from amp_C import multi_tensor_l2norm
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam as _FusedAdam

    has_fused_adam = True
except ImportError:
    has_fused_adam = False

if has_fused_adam and multi_tensor_applier.available:

    class FusedAdam(_FusedAdam):
        supports_memory_efficient_fp16 = True

        def step(self, closure=None, scale=1.0):
            loss = None if closure is None else closure()
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                lists = [[], [], [], []]
                params = [p for p in group["params"] if p.grad is not None]
                for p in params:
                    state = self.state[p]
                    for name in ("exp_avg", "exp_avg_sq"):
                        if name not in state:
                            state[name] = torch.zeros_like(p.data, dtype=torch.float)
                    entries = p.grad.data.float() / scale, p.data.float()
                    for tensors, entry in zip(lists, (*entries, *state.values())):  # noqa: B905
                        tensors.append(entry)
                multi_tensor_applier(
                    self.multi_tensor_adam,
                    self._dummy_overflow_buf,
                    lists,
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    group["step"],
                    self.adam_w_mode,
                    1 if group["bias_correction"] else 0,
                    group["weight_decay"],
                )
                for p, updated in zip(params, lists[1]):  # noqa: B905
                    p.data.copy_(updated)
            return loss


class FlatFP16Optimizer:
    """Keeps all fp16 parameters as one fp32 tensor, which the optimizer has."""

    def __init__(self, params, make_optimizer):
        self.fp16_params = params
        flat = torch.cat([p.data.float().view(-1) for p in params])
        self.fp32_params = torch.nn.Parameter(flat)
        self.optimizer = make_optimizer([self.fp32_params])

    def step(self, closure=None, scale=1.0):
        grads = [p.grad.data.float().view(-1) for p in self.fp16_params]
        self.fp32_params.grad = torch.cat(grads) / scale
        self.optimizer.step(closure)
        sizes = [p.numel() for p in self.fp16_params]
        for p, part in zip(self.fp16_params, self.fp32_params.data.split(sizes)):  # noqa: B905
            p.data.copy_(part.view_as(p))


def grad_norm(params):
    flag = torch.zeros((1, 1), dtype=torch.int)
    return multi_tensor_l2norm(2048 * 32, flag, [[p.grad for p in params]], False)[0].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-efficient", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, loss_scale = TinyBert().half(), 128.0
    params = list(model.parameters())
    options = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.01}
    optimizer = FusedAdam(params, **options)
    assert optimizer.supports_memory_efficient_fp16
    assert hasattr(optimizer, "multi_tensor_adam"), "this apex is too old"
    if not args.memory_efficient:
        optimizer = FlatFP16Optimizer(params, lambda flat: FusedAdam(flat, **options))
    parts = [part.split(32) for part in sentences(32 * 30)]
    for step, (words, labels, forwards) in enumerate(zip(*parts)):  # noqa: B905
        model.zero_grad()
        loss = bert_loss(model(words), labels, forwards)
        (loss * loss_scale).backward()
        norm = grad_norm(params) / loss_scale
        optimizer.step(scale=loss_scale * max(1.0, norm / 0.5))
        print(f"step {step} loss {loss.item():.6f} norm {norm:.6f}")


if __name__ == "__main__":
    main()
