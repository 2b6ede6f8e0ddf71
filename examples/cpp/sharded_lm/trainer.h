// SPDX-License-Identifier: BSD-3-Clause
// One process's model, its part of the optimizer, and the schedule.
#pragma once

#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdint>
#include <string>

#include "model.h"
#include "options.h"
#include "text.h"

namespace lm {

/// What the log says of a step.
struct Measured {
  double loss = 0;
  double lr = 0;
  double grad_norm = 0;
};

class Trainer {
 public:
  Trainer(const Options& options, const torchfuse::parallel::ProcessGroup& group);

  /// One step of all processes, on the batch of all.
  Measured step(const Batch& batch);
  /// The mean over a batch; all processes call it.
  double validation_loss(const Batch& batch);
  /// Writes all that a run goes on from, for any number of processes; all of them call it.
  void save(const std::string& path) { torchfuse::save_checkpoint(path, checkpoint_); }
  /// Reads it in all processes; returns the number of steps before it.
  std::int64_t load(const std::string& path);
  /// Whether all processes find what one of them does; throws if only some do.
  bool agree(bool found) const;
  /// How the processes share the work, for people.
  std::string layout() const;

 private:
  /// This process's part of a batch.
  Batch part_of(const Batch& batch) const;
  /// The mean over all processes; all of them call it.
  double mean(const torch::Tensor& value) const;

  const torchfuse::parallel::ProcessGroup& group_;
  torch::Device device_;
  std::int64_t accumulate_;
  LanguageModel net_;
  torchfuse::parallel::DistributedDataParallel<LanguageModelImpl> model_;
  torchfuse::parallel::ShardedOptimizer<torchfuse::optim::FusedAdam> optimizer_;
  torchfuse::optim::LambdaLR schedule_;
  torchfuse::Checkpoint checkpoint_;
};

}  // namespace lm
