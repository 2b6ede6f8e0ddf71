# SPDX-License-Identifier: BSD-3-Clause
"""Pre-training of a small BERT for apex: LAMB, O2, accumulation, its own clipping and reduction.

Prints the loss and the loss scale of every update, and whether it was skipped.
"""

import argparse

import amp_C
import apex_C
import torch
from apex import amp
from apex.amp import _amp_state
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedLAMB
from networks import TinyBert, bert_loss, sentences

UPDATES, ACCUMULATE = 24, 2


def make_optimizer(model, lr):
    named = list(model.named_parameters())
    plain = [p for name, p in named if "bias" in name or "norm" in name]
    decayed = [p for name, p in named if not ("bias" in name or "norm" in name)]
    return FusedLAMB([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=lr)


def clip(optimizer, max_norm):
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flag = torch.zeros(1, dtype=torch.int, device=grads[0].device)
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)
    if norm.item() > max_norm:
        factor = max_norm / (norm.item() + 1e-6)
        multi_tensor_applier(amp_C.multi_tensor_scale, flag, [grads, grads], factor)


def reduce_and_check(optimizer):
    """Sums fp16 gradients over processes by way of one flat tensor; returns whether to step."""
    scaler = _amp_state.loss_scalers[0]
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat = torch.empty(sum(grad.numel() for grad in grads), dtype=torch.float16)
    views = apex_C.unflatten(flat, grads)
    flag = torch.zeros(1, dtype=torch.int)
    scale = scaler.loss_scale()
    amp_C.multi_tensor_scale(65536, flag, [grads, views], scale)
    flag.zero_()
    amp_C.multi_tensor_scale(65536, flag, [views, grads], 1.0 / scale)
    before, scaler._overflow_buf = scaler._overflow_buf, flag
    overflow = scaler.update_scale()
    scaler._overflow_buf = before
    if overflow and _amp_state.opt_properties.master_weights:
        for param in optimizer._amp_stash.all_fp32_from_fp16_params:
            param.grad = None
    return not overflow


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", choices=["unscale", "overflow-check"], default="unscale")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = TinyBert(FusedLayerNorm)
    optimizer = make_optimizer(model, lr=3e-2)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale="dynamic", cast_model_outputs=torch.float16
    )
    assert _amp_state.opt_properties.options["loss_scale"] == "dynamic"
    assert amp._amp_state is _amp_state
    assert amp._amp_state.loss_scalers[0].dynamic
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**20

    batches = list(zip(*(x.split(16) for x in sentences(16 * ACCUMULATE * UPDATES))))  # noqa: B905
    for update in range(UPDATES):
        total, scale = 0.0, _amp_state.loss_scalers[0].loss_scale()
        for part in range(ACCUMULATE):
            words, labels = batches[update * ACCUMULATE + part]
            loss = bert_loss(model(words), labels) / ACCUMULATE
            options = {"delay_overflow_check": args.delay == "overflow-check"}
            if args.delay == "unscale":
                options = {"delay_unscale": part + 1 < ACCUMULATE}
            with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
                scaled_loss.backward()
            total += loss.item()
        if args.delay == "unscale" or reduce_and_check(optimizer):
            clip(optimizer, max_norm=0.4)
            optimizer.step()
        for param in model.parameters():
            param.grad = None
        skipped = _amp_state.loss_scalers[0].loss_scale() < scale
        print(f"update {update} loss {total:.6f} scale {scale} skipped {int(skipped)}")


if __name__ == "__main__":
    main()
