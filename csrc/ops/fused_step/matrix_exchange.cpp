// SPDX-License-Identifier: BSD-3-Clause
#include "ops/fused_step/matrix_exchange.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "ops/distributed/process_groups.h"

namespace torchfuse::ops {

namespace {

/// Returns a shard's elements in the flat whole matrix.
at::Tensor view_of(const at::Tensor& whole, std::int64_t first, std::int64_t run,
                   std::int64_t stride, std::int64_t numel) {
  if (run == 0) return whole.slice(0, first, first + numel);
  TORCH_INTERNAL_ASSERT(numel % run == 0);
  return whole.as_strided({numel / run, run}, {stride, 1}, whole.storage_offset() + first);
}

const char* dtype_name(std::int64_t dtype) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float64"};
  return kNames[dtype];
}

}  // namespace

bool ShardedMatrix::same_matrix(ShardedMatrix other) const {
  other.name_checksum = name_checksum;
  other.shard = shard;
  return *this == other;
}

bool ShardedMatrix::may_have_name_of(const ShardedMatrix& other) const {
  const bool known = name_checksum != 0 && other.name_checksum != 0;
  return !known || name_checksum == other.name_checksum;
}

std::string ShardedMatrix::text() const {
  const std::string stack = count == 1 ? "" : std::to_string(count) + " x ";
  return c10::str("parameter ", index, " (", stack, rows, " x ", columns, " in ", dtype_name(dtype),
                  ", ", iterations, " iterations in ", dtype_name(products), ")");
}

double ShardedMatrix::cost() const {
  const auto small = static_cast<double>(std::min(rows, columns));
  const auto large = static_cast<double>(std::max(rows, columns));
  return static_cast<double>(iterations * count) * small * small * (2.0 * large + small);
}

void MatrixExchange::plan(const std::vector<ShardedMatrix>& matrices, const c10::Device& device) {
  // This rank's shards may be equal, or empty, in steps of different matrices. Names may change on
  // some ranks only, so another name is no reason for collectives.
  const auto same = [](const ShardedMatrix& a, const ShardedMatrix& b) {
    return a.same_matrix(b) && a.shard == b.shard;
  };
  if (std::ranges::equal(matrices, matrices_, same)) return;
  const auto group = find_group(group_, caller_);
  rank_ = static_cast<std::size_t>(group->getRank());
  size_ = static_cast<std::size_t>(group->getSize());
  choose_owners(matrices);
  learn_shards(matrices, device);
  matrices_ = matrices;
  lay_out();
}

/// The most expensive matrix that is left goes to the rank with the least work.
void MatrixExchange::choose_owners(const std::vector<ShardedMatrix>& matrices) {
  std::vector<std::size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return matrices[a].cost() > matrices[b].cost();
  });
  std::vector<double> work(size_, 0.0);
  owners_.assign(matrices.size(), 0);
  for (const std::size_t matrix : order) {
    const auto least = std::min_element(work.begin(), work.end());
    *least += matrices[matrix].cost();
    owners_[matrix] = static_cast<std::size_t>(least - work.begin());
  }
}

/// The number of matrices travels first, because an all-gather takes equally many from all ranks.
void MatrixExchange::learn_shards(const std::vector<ShardedMatrix>& matrices,
                                  const c10::Device& device) {
  static_assert(std::is_trivially_copyable_v<ShardedMatrix>);
  const auto options = at::TensorOptions().dtype(at::kLong);
  const auto count = static_cast<std::int64_t>(matrices.size());
  const at::Tensor numbers = gathered(at::full({1}, count, options), device);
  const auto* counts = numbers.const_data_ptr<std::int64_t>();
  for (std::size_t rank = 0; rank < size_; ++rank) {
    if (counts[rank] == counts[0]) continue;
    fail_order(c10::str(counts[0], " parameters"), c10::str(counts[rank]), rank);
  }
  const at::Tensor own =
      at::empty({count * static_cast<std::int64_t>(sizeof(ShardedMatrix) / 8)}, options);
  std::memcpy(own.mutable_data_ptr(), matrices.data(), own.nbytes());
  const at::Tensor all = gathered(own, device);
  const auto* next = static_cast<const ShardedMatrix*>(all.const_data_ptr());
  shards_.assign(size_, {});
  for (std::size_t rank = 0; rank < size_; ++rank) {
    for (std::size_t i = 0; i < matrices.size(); ++i, ++next) {
      const ShardedMatrix& first = *(next - rank * matrices.size());
      if (!next->same_matrix(first)) fail_order(first.text(), next->text(), rank);
      if (!next->may_have_name_of(first)) fail_order(first.text(), "one with another name", rank);
      shards_[rank].push_back(next->shard);
    }
  }
}

/// Returns all ranks' numbers, on the CPU. A collective.
at::Tensor MatrixExchange::gathered(const at::Tensor& own, const c10::Device& device) const {
  if (size_ == 1) return own;
  return all_gather(*find_group(group_, caller_), own.to(device), caller_).cpu();
}

void MatrixExchange::fail_order(const std::string& first, const std::string& other,
                                std::size_t rank) const {
  TORCH_CHECK(
      false, caller_, ": expected all ranks of the process group '", group_,
      "' to list the same sharded matrices in the same order, and to have gradients of the ",
      "same ones, got ", first, " on rank 0 and ", other, " on rank ", rank,
      ". Nothing was updated.");
}

/// Returns whether `rank` is the one that sends its shard of `matrix` to the owner.
bool MatrixExchange::sends(std::size_t rank, std::size_t matrix) const {
  std::vector<std::size_t> copies;  // ranks with the same shard
  for (std::size_t other = 0; other < size_; ++other) {
    if (shards_[other][matrix] == shards_[rank][matrix]) copies.push_back(other);
  }
  return copies[owners_[matrix] % copies.size()] == rank;
}

/// Shards travel by rank and then by matrix. Shards that another rank sends come last.
void MatrixExchange::lay_out() {
  const std::size_t count = owners_.size();
  owned_.clear();
  for (std::vector<std::int64_t>* counts : {&to_owners_, &from_ranks_, &to_ranks_, &from_owners_}) {
    counts->assign(size_, 0);
  }
  sent_places_.assign(count, 0);
  received_places_.assign(count, 0);
  gathered_.clear();
  scattered_.clear();
  std::int64_t sent = 0;
  numel_ = 0;
  for (std::size_t owner = 0; owner < size_; ++owner) {
    for (std::size_t matrix = 0; matrix < count; ++matrix) {
      if (owners_[matrix] != owner) continue;
      const std::int64_t numel = shards_[rank_][matrix].numel;
      received_places_[matrix] = numel_;
      numel_ += numel;
      from_owners_[owner] += numel;
      if (owner == rank_) owned_.push_back(matrix);
      if (!sends(rank_, matrix)) continue;
      sent_places_[matrix] = sent;
      sent += numel;
      to_owners_[owner] += numel;
    }
  }
  for (std::size_t matrix = 0; matrix < count; ++matrix) {
    if (sends(rank_, matrix)) continue;
    sent_places_[matrix] = sent;
    sent += shards_[rank_][matrix].numel;
  }
  for (std::size_t rank = 0; rank < size_; ++rank) {
    for (std::size_t i = 0; i < owned_.size(); ++i) {
      const MatrixShard& shard = shards_[rank][owned_[i]];
      if (shard.numel == 0) continue;
      scattered_.push_back({i, shard});
      to_ranks_[rank] += shard.numel;
      if (!sends(rank, owned_[i])) continue;
      gathered_.push_back({i, shard});
      from_ranks_[rank] += shard.numel;
    }
  }
}

/// Returns what the other ranks sent. Travels as bytes, which every backend sends.
at::Tensor MatrixExchange::exchange(const at::Tensor& sent,
                                    const std::vector<std::int64_t>& sent_counts,
                                    const std::vector<std::int64_t>& received_counts) const {
  const auto total =
      std::accumulate(received_counts.begin(), received_counts.end(), std::int64_t{0});
  at::Tensor received = at::empty({total}, sent.options());
  if (size_ == 1) {
    received.copy_(sent);
    return received;
  }
  const auto itemsize = static_cast<std::int64_t>(sent.itemsize());
  const auto in_bytes = [itemsize](std::vector<std::int64_t> counts) {
    for (std::int64_t& count : counts) count *= itemsize;
    return counts;
  };
  std::vector<std::int64_t> out = in_bytes(received_counts);
  std::vector<std::int64_t> in = in_bytes(sent_counts);
  const auto group = find_group(group_, caller_);
  const auto backend = group->getBackend(sent.device().type());
  at::Tensor output = received.view(at::kByte);
  at::Tensor input = sent.view(at::kByte);
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  run_collective(*group, caller_,
                 [&] { return backend->alltoall_base(output, input, out, in, options); });
  return received;
}

void MatrixExchange::gather(const at::Tensor& shards, const std::vector<at::Tensor>& whole) const {
  const auto sent = std::accumulate(to_owners_.begin(), to_owners_.end(), std::int64_t{0});
  const at::Tensor received = exchange(shards.slice(0, 0, sent), to_owners_, from_ranks_);
  std::int64_t begin = 0;
  for (const auto& [owned, shard] : gathered_) {
    const at::Tensor place =
        view_of(whole[owned], shard.first, shard.run, shard.stride, shard.numel);
    place.copy_(received.slice(0, begin, begin + shard.numel).view(place.sizes()));
    begin += shard.numel;
  }
}

at::Tensor MatrixExchange::scatter(const std::vector<at::Tensor>& whole,
                                   const at::TensorOptions& options) const {
  const auto total = std::accumulate(to_ranks_.begin(), to_ranks_.end(), std::int64_t{0});
  const at::Tensor sent = at::empty({total}, options);
  std::int64_t begin = 0;
  for (const auto& [owned, shard] : scattered_) {
    const at::Tensor place =
        view_of(whole[owned], shard.first, shard.run, shard.stride, shard.numel);
    sent.slice(0, begin, begin + shard.numel).view(place.sizes()).copy_(place);
    begin += shard.numel;
  }
  return exchange(sent, to_ranks_, from_owners_);
}

MatrixExchange& MatrixExchanges::of(const char* caller, const Bucket& bucket,
                                    at::ScalarType dtype) {
  const std::string& group = *bucket.exchange_group;
  for (Entry& entry : entries_) {
    if (entry.key == bucket.key && entry.dtype == dtype && entry.exchange.group() == group) {
      return entry.exchange;
    }
  }
  entries_.push_back({bucket.key, dtype, MatrixExchange(group, caller)});
  return entries_.back().exchange;
}

}  // namespace torchfuse::ops
