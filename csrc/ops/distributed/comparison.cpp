// SPDX-License-Identifier: BSD-3-Clause
// Whether all ranks have the same number.
//
// Note [Staggered messages]
// Ranks of one machine often come to a comparison at the same time. A thread of Gloo that finds a
// connection locked tries again until it is free; where it has taken the processor from the thread
// that holds the lock, both wait for the end of its time slice. On two processors that made 2 ms of
// 0.2, in most steps. So one of two ranks that exchange numbers begins a little later.
#include <ATen/Functions.h>
#include <torchfuse/collectives.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "ops/distributed/process_groups.h"

namespace torchfuse {

namespace {

/// Gloo matches messages by tag alone. Programs begin at 0, reduce-scatters at 2^30.
constexpr int kFirstTag = (1 << 30) + (1 << 29);

/// See Note [Staggered messages]. Systems make 70 of it.
constexpr std::chrono::microseconds kStagger(20);

using ops::wait_for;

/// Passes on what a rank knows of all, to the ranks 1, 2, 4 and so on places further: after
/// log2(size) rounds each knows of all. In Gloo's all-reduce threads hand over to threads, which
/// takes longer than the messages.
void spread(c10d::Backend& backend, const at::Tensor& ends) {
  const int rank = backend.getRank();
  const int size = backend.getSize();
  auto* const known = ends.mutable_data_ptr<std::int64_t>();
  int tag = kFirstTag;
  for (int distance = 1; distance < size; distance *= 2, ++tag) {
    std::vector<at::Tensor> sent{ends};
    std::vector<at::Tensor> received{ends.clone()};
    if ((rank & distance) != 0) std::this_thread::sleep_for(kStagger);
    const auto receiving = backend.recv(received, (rank + size - distance) % size, tag);
    const auto sending = backend.send(sent, (rank + distance) % size, tag);
    wait_for(receiving);
    wait_for(sending);
    const auto* const other = received[0].const_data_ptr<std::int64_t>();
    for (int end = 0; end < 2; ++end) known[end] = std::max(known[end], other[end]);
  }
}

}  // namespace

bool same_on_all_ranks(c10d::ProcessGroup& group, const at::Device& device, std::int64_t number) {
  const auto backend = group.getBackend(device.type());
  // The largest, and the complement of the smallest.
  at::Tensor ends = at::tensor({number, ~number}, at::kLong);
  if (device.is_cpu() && backend->getBackendName() == "gloo") {
    spread(*backend, ends);
  } else {
    std::vector<at::Tensor> all{ends.to(device)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    wait_for(backend->allreduce(all, options));
    ends = all[0].cpu();
  }
  const auto* const found = ends.const_data_ptr<std::int64_t>();
  return found[0] == ~found[1];
}

}  // namespace torchfuse
