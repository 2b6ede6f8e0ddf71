# SPDX-License-Identifier: BSD-3-Clause
"""Names a replacement for each apex module that torchfuse does not provide."""

from __future__ import annotations

from collections.abc import Mapping

_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_CONVOLUTION = "torch.nn.Conv2d with torch.compile"
_SOFTMAX = "torch.softmax with torch.compile"
_SHARDED = "torch.distributed.fsdp.fully_shard with a class of torchfuse.optimizers"
_SYMMETRIC_MEMORY = "torch.distributed and its symmetric memory"

#: Replacement by apex module. An entry also covers the module's submodules and names.
INSTEAD: Mapping[str, str] = {
    "apex.RNN": "torch.nn.LSTM and torch.nn.GRU",
    "apex.contrib.bottleneck": _CONVOLUTION,
    "apex.contrib.conv_bias_relu": _CONVOLUTION,
    "apex.contrib.cudnn_gbn": "apex.parallel.SyncBatchNorm",
    "apex.contrib.fmha": _ATTENTION,
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "apex.parallel.SyncBatchNorm",
    "apex.contrib.index_mul_2d": "indexing and a product, with torch.compile",
    "apex.contrib.multihead_attn": _ATTENTION,
    "apex.contrib.nccl_allocator": "torch.cuda.MemPool",
    "apex.contrib.nccl_p2p": _SYMMETRIC_MEMORY,
    "apex.contrib.openfold_triton": _ATTENTION,
    "apex.contrib.optimizers.distributed_fused_adam": _SHARDED,
    "apex.contrib.optimizers.distributed_fused_lamb": _SHARDED,
    "apex.contrib.optimizers.fused_adam": "torchfuse.optimizers.FusedAdam",
    "apex.contrib.optimizers.fused_lamb": "torchfuse.optimizers.FusedLAMB",
    "apex.contrib.optimizers.fused_sgd": "torchfuse.optimizers.FusedSGD",
    "apex.contrib.peer_memory": _SYMMETRIC_MEMORY,
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured",
    "apex.contrib.torchsched": "torch.compile",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.distributed_testing": "torchrun and pytest",
    "apex.fused_dense": "torch.nn.Linear and torch.nn.GELU, with torch.compile",
    "apex.mlp": "torch.nn.Linear and torch.nn.ReLU, with torch.compile",
    "apex.parallel.multiproc": "torchrun",
    "apex.parallel.optimized_sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.parallel.sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "megatron.core",
    # apex's native modules.
    "bnp": "apex.parallel.SyncBatchNorm",
    "cudnn_gbn_lib": "apex.parallel.SyncBatchNorm",
    "distributed_adam_cuda": _SHARDED,
    "distributed_lamb_cuda": _SHARDED,
    "fast_bottleneck": _CONVOLUTION,
    "fast_layer_norm": "torch.nn.functional.layer_norm",
    "fast_multihead_attn": _ATTENTION,
    "fmhalib": _ATTENTION,
    "focal_loss_cuda": "torchvision.ops.sigmoid_focal_loss",
    "fused_adam_cuda": "amp_C.multi_tensor_adam or torchfuse.optimizers.FusedAdam",
    "fused_conv_bias_relu": _CONVOLUTION,
    "fused_dense_cuda": "torch.nn.Linear and torch.nn.GELU, with torch.compile",
    "fused_index_mul_2d": "indexing and a product, with torch.compile",
    "fused_lamb_cuda": "amp_C.multi_tensor_lamb or torchfuse.optimizers.FusedLAMB",
    "fused_rotary_positional_embedding": "a product and torch.roll, with torch.compile",
    "fused_weight_gradient_mlp_cuda": "torch.addmm",
    "generic_scaled_masked_softmax_cuda": _SOFTMAX,
    "group_norm_cuda": "torch.nn.GroupNorm",
    "mlp_cuda": "torch.nn.Linear and torch.nn.ReLU, with torch.compile",
    "nccl_p2p_cuda": _SYMMETRIC_MEMORY,
    "peer_memory_cuda": _SYMMETRIC_MEMORY,
    "permutation_search_cuda": "torch.sparse.to_sparse_semi_structured",
    "scaled_masked_softmax_cuda": _SOFTMAX,
    "scaled_softmax_cuda": _SOFTMAX,
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
    "transducer_joint_cuda": "torchaudio.functional.rnnt_loss",
    "transducer_loss_cuda": "torchaudio.functional.rnnt_loss",
}
