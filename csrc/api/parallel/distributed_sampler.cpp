// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torchfuse/parallel/distributed_sampler.h>

#include <algorithm>

namespace torchfuse::parallel {

constexpr const char* kName = "torchfuse::parallel::DistributedSampler";

DistributedSampler::DistributedSampler(std::size_t size, const DistributedSamplerOptions& options)
    : data_size_(size),
      options_(options),
      epoch_(std::make_shared<std::atomic<std::int64_t>>(0)),
      start_(std::make_shared<std::atomic<std::size_t>>(0)) {
  TORCH_CHECK_VALUE(options.num_replicas() > 0, kName,
                    ": expected num_replicas to be at least 1, got ", options.num_replicas(), ".");
  TORCH_CHECK_VALUE(options.rank() >= 0 && options.rank() < options.num_replicas(), kName,
                    ": expected rank to be at least 0 and below num_replicas ",
                    options.num_replicas(), ", got ", options.rank(), ".");
  reset();
}

std::size_t DistributedSampler::size() const {
  const auto replicas = static_cast<std::size_t>(options_.num_replicas());
  return options_.drop_last() ? data_size_ / replicas : (data_size_ + replicas - 1) / replicas;
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  data_size_ = new_size.value_or(data_size_);
  TORCH_CHECK_VALUE(data_size_ > 0, kName, ": expected size to be at least 1, got 0.");
  const auto count = static_cast<std::int64_t>(data_size_);
  at::Tensor order;
  if (options_.shuffle()) {
    auto generator =
        at::detail::createCPUGenerator(static_cast<std::uint64_t>(options_.seed() + epoch()));
    order = at::randperm(count, generator, at::TensorOptions(at::kLong));
  } else {
    order = at::arange(count, at::kLong);
  }
  const auto* numbers = order.const_data_ptr<std::int64_t>();
  const auto replicas = static_cast<std::size_t>(options_.num_replicas());
  indices_.resize(size());
  for (std::size_t place = 0; place < indices_.size(); ++place) {
    // Wrap around at the end of the data set.
    const std::size_t global = place * replicas + static_cast<std::size_t>(options_.rank());
    indices_[place] = static_cast<std::size_t>(numbers[global % data_size_]);
  }
  position_ = std::min(start_->exchange(0), indices_.size());
}

void DistributedSampler::resume(std::int64_t epoch, std::size_t position) {
  TORCH_CHECK_VALUE(position <= size(), kName, ": expected position to be at most ", size(),
                    ", got ", position, ".");
  set_epoch(epoch);
  *start_ = position;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  const std::size_t count = std::min(batch_size, indices_.size() - position_);
  if (count == 0) return std::nullopt;
  const auto first = indices_.begin() + static_cast<std::ptrdiff_t>(position_);
  position_ += count;
  return std::vector<std::size_t>(first, first + static_cast<std::ptrdiff_t>(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", c10::IValue(epoch()));
  archive.write("position", c10::IValue(static_cast<std::int64_t>(position_)));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue epoch;
  c10::IValue position;
  archive.read("epoch", epoch);
  archive.read("position", position);
  const auto place = position.toInt();
  TORCH_CHECK_VALUE(place >= 0 && static_cast<std::size_t>(place) <= size(), kName,
                    ": expected the saved position to be at most ", size(), ", got ", place,
                    ". Use the data set and the number of processes of the saved run.");
  set_epoch(epoch.toInt());
  reset();
  position_ = static_cast<std::size_t>(place);
}

}  // namespace torchfuse::parallel
