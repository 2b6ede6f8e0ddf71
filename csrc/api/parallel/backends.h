// SPDX-License-Identifier: BSD-3-Clause
// One function for each backend, in a file of its own: their headers are the ones that change.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "api/parallel/rendezvous.h"

namespace torchfuse::parallel {

/// What a backend is made from.
struct BackendArguments {
  c10::intrusive_ptr<c10d::Store> store;
  RankInfo self;
  std::chrono::milliseconds timeout;
  std::string name;
};

/// Connects to all other ranks before it returns.
void add_gloo(c10d::ProcessGroup& group, const BackendArguments& arguments);
/// Makes the local rank's GPU the current one; connects at the first collective.
void add_nccl(c10d::ProcessGroup& group, const BackendArguments& arguments);
/// Whether this build has add_nccl.
bool has_nccl();

}  // namespace torchfuse::parallel
