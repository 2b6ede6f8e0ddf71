# SPDX-License-Identifier: BSD-3-Clause
"""Parameter sets have the sizes that were published, and lie in memory as they say."""

from __future__ import annotations

import torch

from suites import parameters

CPU = torch.device("cpu")


def test_models_have_as_many_elements_as_was_published() -> None:
    assert parameters.load("gpt2_124m").numel == 124_439_808
    assert len(parameters.load("gpt2_124m").shapes) == 148
    slice_of_vit = parameters.load("vit_l16_6_layers")
    layer = 4 * 1024 * 1024 + 2 * 1024 * 4096 + (3072 + 1024) + (4096 + 1024) + 4 * 1024
    assert slice_of_vit.numel + 18 * layer == 304_326_632
    lora = parameters.load("lora_1024x8x4096")
    assert (len(lora.shapes), lora.numel) == (1024, 2**25)


def test_buckets_are_flat_buffers_that_tensors_share() -> None:
    plain, buckets = (parameters.load(name) for name in ("resnet50", "ddp_buckets"))
    assert buckets.shapes == plain.shapes
    tensors = buckets.randn(torch.float32, CPU, seed=0)
    assert tuple(tuple(tensor.shape) for tensor in tensors) == plain.shapes
    assert tensors[0].data_ptr() == tensors[1].data_ptr() + 4 * tensors[1].numel()
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(sizes.values()) == 4 * plain.numel
    assert len(sizes) == 4
    assert sum(size >= 25 * 2**20 for size in sizes.values()) >= 3
    halves = buckets.randn(torch.bfloat16, CPU, seed=0)
    assert len({half.untyped_storage().data_ptr() for half in halves}) == 4


def test_a_set_can_be_cut_to_one_element_each() -> None:
    whole = parameters.load("misaligned")
    cut = whole.of_one_element()
    assert cut.numel == len(cut.shapes) == len(whole.shapes)
    (tensor, *_) = cut.randn(torch.float32, CPU, seed=0)
    assert tensor.storage_offset() == whole.offset
