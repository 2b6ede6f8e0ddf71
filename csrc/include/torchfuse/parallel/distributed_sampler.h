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

/// Options of DistributedSampler; names and defaults as torch.utils.data.DistributedSampler.
struct DistributedSamplerOptions {
  TORCH_ARG(std::int64_t, num_replicas) = 1;  ///< number of processes
  TORCH_ARG(std::int64_t, rank) = 0;          ///< of this process, below num_replicas
  TORCH_ARG(bool, shuffle) = true;            ///< a new order in each epoch
  TORCH_ARG(std::int64_t, seed) = 0;          ///< of the order; the same in all processes
  /// Drop the last samples where the size is not a multiple of num_replicas, rather than repeat the
  /// first.
  TORCH_ARG(bool, drop_last) = false;
};

/// The part of a data set that one process sees: a sampler for torch::data, with the indices of
/// Python's torch.utils.data.DistributedSampler, number for number. LibTorch's own distributed
/// samplers shuffle by another generator and give each process a contiguous part.
///
///     DistributedSampler sampler(
///         size, DistributedSamplerOptions().num_replicas(group.world_size()).rank(group.rank()));
///     auto loader = torch::data::make_data_loader(std::move(data), sampler, batch_size);
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) ...
///     }
///
/// A data loader keeps a copy of its sampler: copies share the epoch, not the position.
class TORCHFUSE_API DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// @param size of the data set, at least 1.
  /// @param options see DistributedSamplerOptions.
  explicit DistributedSampler(std::size_t size, const DistributedSamplerOptions& options = {});

  /// Which order reset() takes; a data loader calls that where an epoch begins.
  void set_epoch(std::int64_t epoch) { *epoch_ = epoch; }
  /// As set by set_epoch(); 0 at first.
  std::int64_t epoch() const { return *epoch_; }
  /// Number of indices in an epoch, the same in all processes.
  std::size_t size() const;
  /// This process's indices in the epoch that reset() began.
  const std::vector<std::size_t>& indices() const { return indices_; }

  /// Begins an epoch, of a data set of `new_size` if given.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// The next `batch_size` indices, fewer at the end, then none.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// Writes epoch and position.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Goes on where the saved sampler was.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::size_t data_size_;
  DistributedSamplerOptions options_;
  std::shared_ptr<std::atomic<std::int64_t>> epoch_;
  std::vector<std::size_t> indices_;
  std::size_t position_ = 0;
};

}  // namespace torchfuse::parallel
