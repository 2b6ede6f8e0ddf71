# SPDX-License-Identifier: BSD-3-Clause
# Lists all kernels, ops and optimizers. The functions (TorchfuseFunctions.cmake) only record names, which
# csrc/kernels and csrc/ops use.

# Files: kernels/<name>.h  kernels/cpu/<name>_cpu.cpp  kernels/cuda/<name>_cuda.cu
torchfuse_add_kernel(prologue)

# Files: the same, and ops/<folder>/<name>.cpp. SIMD: the CPU file is compiled once per instruction level.
torchfuse_add_op(multi_tensor/multi_tensor_l2_norm SIMD)
torchfuse_add_op(multi_tensor/multi_tensor_unscale SIMD)
torchfuse_add_op(multi_tensor/amp_update_scale)
torchfuse_add_op(batch_norm/batch_norm SIMD)
torchfuse_add_op(batch_norm/batch_norm_backward SIMD)
torchfuse_add_op(layer_norm/layer_norm SIMD)
torchfuse_add_op(layer_norm/layer_norm_backward SIMD)
torchfuse_add_op(losses/softmax_cross_entropy SIMD)

# Files: kernels/functors/<name>.h. The kernels are generated from kernels/instantiate/*.in, and the op
# from ops/fused_step/fused_op.cpp.in and the declaration in include/torchfuse/ops.h. CPP_CLASS: also
# include/torchfuse/optim/fused_<name>.h and api/optim/fused_<name>.cpp. LAYERWISE: the update needs norms
# over whole tensors; the kernels for the norms are generated from kernels/instantiate/measure_*.in. PASSES:
# functors in the same file that have kernels, in the place of the optimizer's.
torchfuse_add_fused_optimizer(adam Adam CPP_CLASS)
torchfuse_add_fused_optimizer(lamb Lamb LAYERWISE CPP_CLASS)
torchfuse_add_fused_optimizer(novograd NovoGrad LAYERWISE CPP_CLASS)
torchfuse_add_fused_optimizer(lars Lars LAYERWISE CPP_CLASS)
torchfuse_add_fused_optimizer(sgd Sgd CPP_CLASS)
torchfuse_add_fused_optimizer(adagrad Adagrad CPP_CLASS)
torchfuse_add_fused_optimizer(lion Lion CPP_CLASS)
torchfuse_add_fused_optimizer(muon Muon CPP_CLASS PASSES MuonMomentum MuonUpdate)
