// SPDX-License-Identifier: BSD-3-Clause
// Sums of which each rank keeps a part.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "api/parallel/collectives.h"

namespace torchfuse::parallel {

namespace {

/// Gloo matches messages by tag alone. Programs, which may have some under way, begin at 0.
constexpr int kFirstTag = 1 << 30;

/// Sends each rank its part, and receives all ranks' numbers for the own one.
void exchange(c10d::Backend& backend, PendingParts& pending, int tag) {
  const std::int64_t rank = backend.getRank();
  const std::int64_t size = backend.getSize();
  const std::vector<at::Tensor> parts = pending.flat.chunk(size);
  pending.own = parts[static_cast<std::size_t>(rank)];
  pending.received = at::empty({size - 1, pending.own.numel()}, pending.flat.options());
  // Neighbors first, so that not all ranks send to the same one.
  for (std::int64_t step = 1; step < size; ++step) {
    const auto source = static_cast<int>((rank + size - step) % size);
    const auto target = static_cast<int>((rank + step) % size);
    std::vector<at::Tensor> received{pending.received[step - 1]};
    std::vector<at::Tensor> sent{parts[static_cast<std::size_t>(target)]};
    pending.works.push_back(backend.recv(received, source, tag));
    pending.works.push_back(backend.send(sent, target, tag));
  }
}

}  // namespace

PendingParts Collectives::start_reduce_scatter(const at::Tensor& flat,
                                               c10d::ReduceOp::RedOpType operation,
                                               std::int64_t tag, std::string what) const {
  PendingParts pending{{}, flat, {}, {}, std::move(what)};
  if (size() == 1) {
    pending.own = flat;
    return pending;
  }
  const auto target = backend(flat.device());
  try {
    if (flat.device().is_cpu()) {
      exchange(*target, pending, kFirstTag + static_cast<int>(tag));
      return pending;
    }
    pending.own = at::empty({flat.numel() / size()}, flat.options());
    c10d::ReduceScatterOptions options;
    options.reduceOp = operation;
    options.asyncOp = true;
    at::Tensor all = flat;
    pending.works.push_back(target->_reduce_scatter_base(pending.own, all, options));
    return pending;
  } catch (const std::exception& error) {
    fail(pending.what, error);
  }
}

at::Tensor Collectives::wait(PendingParts& pending) const {
  const at::NoGradGuard no_grad;
  const PendingParts now = std::exchange(pending, {});
  try {
    for (const auto& work : now.works) wait_for(work);
  } catch (const std::exception& error) {
    fail(now.what, error);
  }
  if (!now.received.defined()) return now.own;
  // Sums of 16-bit numbers are rounded once. Not a view, which would keep the flat tensor.
  const bool from_one = now.received.size(0) == 1;
  return at::add(now.own, from_one ? now.received[0] : now.received.sum(0));
}

}  // namespace torchfuse::parallel
