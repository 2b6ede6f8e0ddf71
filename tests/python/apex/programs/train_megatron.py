# SPDX-License-Identifier: BSD-3-Clause
"""bf16 training with fp32 main parameters, which uses pieces of apex that are there.

Prints which those are, then the loss, the norm of the gradients and that of the heads' of every
step, and whether it was skipped.
"""

import argparse
import inspect

import torch
from networks import TinyBert, bert_loss, sentences

try:
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    l2_norm_impl, scale_impl = amp_C.multi_tensor_l2norm, amp_C.multi_tensor_scale
    HAVE_MULTI_TENSOR = True
except ImportError:
    HAVE_MULTI_TENSOR = False

    def multi_tensor_applier(op, overflow_buf, lists, *args):
        return op(65536, overflow_buf, lists, *args)

    def l2_norm_impl(chunk_size, overflow_buf, lists, per_parameter):
        norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
        return norms.norm().view(1), norms if per_parameter else norms[:0]

    def scale_impl(chunk_size, overflow_buf, lists, scale):
        for source, target in zip(*lists):  # noqa: B905
            overflow_buf |= int(not source.isfinite().all())
            target.copy_(source * scale)


try:
    from apex.optimizers import FusedAdam as Adam
except ImportError:
    from torch.optim import AdamW as Adam

try:
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction

    HAVE_FUSED_LAYER_NORM = True
except ImportError:
    HAVE_FUSED_LAYER_NORM = False


class LayerNorm(torch.nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.bias = torch.nn.Parameter(torch.zeros(size))
        self.args = torch.Size((size,)), eps

    def forward(self, input):
        weight, (shape, eps) = self.weight + 1, self.args
        if HAVE_FUSED_LAYER_NORM:
            known = inspect.getfullargspec(FusedLayerNormAffineFunction.forward).args
            more = (True,) if "memory_efficient" in known else ()
            return FusedLayerNormAffineFunction.apply(input, weight, self.bias, shape, eps, *more)
        return torch.nn.functional.layer_norm(input, shape, weight, self.bias, eps)


def copy_this_to_that(this, that, overflow_buf):
    overflow_buf.fill_(0)
    multi_tensor_applier(scale_impl, overflow_buf, [this, that], 1.0)


def clip_grads(grads, max_norm, overflow_buf):
    norm, _ = multi_tensor_applier(l2_norm_impl, overflow_buf, [grads], False)
    _, norms = multi_tensor_applier(l2_norm_impl, overflow_buf, [grads], True)
    factor = max_norm / (norm.item() + 1e-6)
    if factor < 1.0:
        multi_tensor_applier(scale_impl, overflow_buf, [grads, grads], factor)
    return norm.item(), norms[-1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--params-dtype", choices=["float32", "bfloat16"], default="bfloat16")
    args = parser.parse_args()
    print(f"multi_tensor {int(HAVE_MULTI_TENSOR)} layer_norm {int(HAVE_FUSED_LAYER_NORM)}")

    torch.manual_seed(0)
    model = TinyBert(LayerNorm).to(getattr(torch, args.params_dtype))
    params = list(model.parameters())
    mains = [torch.nn.Parameter(p.detach().clone().float()) for p in params]
    optimizer = Adam(mains, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    dummy_overflow_buf = torch.zeros(1, dtype=torch.int)
    parts = [part.split(32) for part in sentences(32 * 30)]
    for step, (words, labels, forwards) in enumerate(zip(*parts)):  # noqa: B905
        model.zero_grad()
        loss = bert_loss(model(words), labels, forwards)
        (loss * float("inf") if step == 3 else loss).backward()
        grads = [torch.empty_like(p) for p in mains]
        for p, grad in zip(mains, grads):  # noqa: B905
            p.grad = grad
        copy_this_to_that([p.grad for p in params], grads, dummy_overflow_buf)
        skipped, norm, norm_of_heads = bool(dummy_overflow_buf.item()), 0.0, 0.0
        if not skipped:
            norm, norm_of_heads = clip_grads(grads, 0.5, dummy_overflow_buf)
            optimizer.step()
            copy_this_to_that([p.data for p in mains], [p.data for p in params], dummy_overflow_buf)
        print(f"step {step} loss {loss.item():.6f} norm {norm:.6f}", end=" ")
        print(f"heads {norm_of_heads:.6f} skipped {int(skipped)}")


if __name__ == "__main__":
    main()
