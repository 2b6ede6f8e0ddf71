// SPDX-License-Identifier: BSD-3-Clause
// Creates backends. Each backend has a separate source file, because its torch headers change
// often.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "api/parallel/rendezvous.h"

namespace torchfuse::parallel {

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
/// Returns whether this build contains add_nccl.
bool has_nccl();

}  // namespace torchfuse::parallel
