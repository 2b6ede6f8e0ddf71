// SPDX-License-Identifier: BSD-3-Clause
// The whole C++ API of torchfuse.
#pragma once

#include <torchfuse/amp/autocast.h>
#include <torchfuse/amp/custom_function.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/batch_norm.h>
#include <torchfuse/clip_grad.h>
#include <torchfuse/collectives.h>
#include <torchfuse/cpu_isa.h>
#include <torchfuse/device_copy.h>
#include <torchfuse/fused_step.h>
#include <torchfuse/layer_norm.h>
#include <torchfuse/masters.h>
#include <torchfuse/missing_ranks.h>
#include <torchfuse/nn/fused_layer_norm.h>
#include <torchfuse/nn/sync_batch_norm.h>
#include <torchfuse/ops.h>
#include <torchfuse/optim/fused_adagrad.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/fused_lamb.h>
#include <torchfuse/optim/fused_lars.h>
#include <torchfuse/optim/fused_lion.h>
#include <torchfuse/optim/fused_novograd.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>
#include <torchfuse/optim/fused_sgd.h>
#include <torchfuse/optim/optimizer_class.h>
#include <torchfuse/parallel/convert_sync_batch_norm.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/distributed_sampler.h>
#include <torchfuse/parallel/process_group.h>
#include <torchfuse/softmax_cross_entropy.h>
#include <torchfuse/step_views.h>
#include <torchfuse/version.h>
#include <torchfuse/write_back_grads.h>
