// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/data/samplers/base.h>
#include <torch/serialize/archive.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse::parallel {

/// DistributedSampler options. Names and defaults as in torch.utils.data.DistributedSampler.
struct DistributedSamplerOptions {
  TORCH_ARG(std::int64_t, num_replicas) = 1;  ///< number of processes
  TORCH_ARG(std::int64_t, rank) = 0;          ///< rank of this process, below num_replicas
  TORCH_ARG(bool, shuffle) = true;            ///< use a new order in each epoch
  TORCH_ARG(std::int64_t, seed) = 0;          ///< shuffling seed, equal in all processes
  /// If the size is not a multiple of num_replicas, drop the last samples; false: repeat the first
  /// samples.
  TORCH_ARG(bool, drop_last) = false;
};

/// A sampler for torch::data that gives each process a share of the data set, with the same indices
/// as Python's torch.utils.data.DistributedSampler. LibTorch's distributed samplers use a different
/// random generator and give each process a contiguous range.
///
///     DistributedSampler sampler(
///         size, DistributedSamplerOptions().num_replicas(group.world_size()).rank(group.rank()));
///     auto loader = torch::data::make_data_loader(std::move(data), sampler, batch_size);
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) ...
///     }
///
/// Data loaders copy the sampler: copies share the epoch, not the position.
class TORCHFUSE_API DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// @param size data set size in samples, at least 1.
  /// @param options see DistributedSamplerOptions.
  /// @throws c10::ValueError for a size or an option out of range.
  explicit DistributedSampler(std::size_t size, const DistributedSamplerOptions& options = {});

  /// Sets the epoch whose order reset() uses. A data loader calls reset() when an epoch begins.
  void set_epoch(std::int64_t epoch) {
    if (epoch_->exchange(epoch) != epoch) *start_ = 0;
  }
  /// Sets the epoch, and makes the next reset(), of this sampler or a copy, begin after the first
  /// `position` indices, unless set_epoch() sets another epoch first. Later resets begin at 0.
  /// @throws c10::ValueError for a position above size().
  void resume(std::int64_t epoch, std::size_t position);
  /// Returns the epoch that set_epoch() set (initially 0).
  std::int64_t epoch() const { return *epoch_; }
  /// Returns how many indices an epoch has, equal in all processes.
  std::size_t size() const;
  /// Returns this process's indices in the epoch that reset() began.
  const std::vector<std::size_t>& indices() const { return indices_; }

  /// Begins an epoch.
  /// @param new_size new data set size; `nullopt` (default) keeps the size.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Returns the next `batch_size` indices, fewer at the end of the epoch, then `nullopt`.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// Writes the epoch and the position.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Resumes at the saved sampler's epoch and position.
  /// @throws c10::ValueError for a position above size().
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::size_t data_size_;
  DistributedSamplerOptions options_;
  std::shared_ptr<std::atomic<std::int64_t>> epoch_;
  std::shared_ptr<std::atomic<std::size_t>> start_;  ///< where the next reset() begins, once
  std::vector<std::size_t> indices_;
  std::size_t position_ = 0;
};

}  // namespace torchfuse::parallel
