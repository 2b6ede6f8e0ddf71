// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/collectives.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torchfuse/missing_ranks.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>
#include <utility>

#include "api/message_of.h"

namespace torchfuse::parallel {

namespace {

constexpr std::size_t kBytesAtATime = std::size_t{25} << 20;
constexpr const char* kComparison = "the comparison of their calls";

/// FNV-1a: the same in every process.
std::int64_t checksum(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char each : text) {
    hash = (hash ^ static_cast<unsigned char>(each)) * 0x100000001b3;
  }
  return static_cast<std::int64_t>(hash);
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

bool exchanges(const c10d::ProcessGroup& group, const c10::Device& device) {
  const auto devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [&](const auto& each) { return each.type() == device.type(); });
}

}  // namespace

void wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

Collectives::Collectives(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string who)
    : group_(std::move(group)), who_(std::move(who)) {
  TORCH_CHECK_VALUE(group_, who_, ": expected group to be a process group, got none.");
  name_ = group_->getGroupName();
}

c10::intrusive_ptr<c10d::Backend> Collectives::backend(const c10::Device& device) const {
  TORCH_CHECK_VALUE(exchanges(*group_, device), who_, ": expected group '", name_,
                    "' to reduce tensors on ", device, ", got one of backend \"",
                    group_->getBackendName(), "\". Move the module, or use another backend.");
  return group_->getBackend(device.type());
}

bool Collectives::averages(const c10::Device& device) const {
  return backend(device)->getBackendName() == "nccl";
}

template <class Action>
auto Collectives::named(const std::string& what, const Action& action) const {
  try {
    return action();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, who_, ": expected all ", size(), " ranks of group '", name_, "' in ", what,
                " within the group's timeout, got in rank ", rank(), ": ", clause_of(error), ". ",
                describe_missing_ranks(*group_));
  }
}

Pending Collectives::start_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType operation,
                                      std::string what) const {
  const auto target = backend(tensor.device());
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = operation;
  options.asyncOp = true;
  auto work = named(what, [&] { return target->allreduce(tensors, options); });
  return {std::move(work), std::move(what)};
}

void Collectives::wait(Pending& pending) const {
  const Pending now = std::exchange(pending, {});
  named(now.what, [&] { wait_for(now.work); });
}

bool Collectives::agree(const c10::Device& device, std::int64_t number,
                        const std::string& what) const {
  // The maxima of number and complement give the largest and the smallest number.
  at::Tensor ends = at::tensor({number, ~number}, at::kLong).to(device);
  Pending pending = start_all_reduce(ends, c10d::ReduceOp::MAX, what);
  wait(pending);
  ends = ends.cpu();
  const auto* found = ends.const_data_ptr<std::int64_t>();
  return found[0] == ~found[1];
}

void Collectives::sum(const at::Tensor& tensor, std::string what) const {
  Pending pending = start_all_reduce(tensor, c10d::ReduceOp::SUM, std::move(what));
  wait(pending);
}

void Collectives::broadcast(const at::Tensor& tensor, const std::string& what,
                            std::int64_t root) const {
  const auto target = backend(tensor.device());
  std::vector<at::Tensor> tensors{tensor.view(-1).view(at::kByte)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  named(what, [&] { wait_for(target->broadcast(tensors, options)); });
}

bool Collectives::has_cpu() const { return exchanges(*group_, at::kCPU); }

void Collectives::all_gather(const at::Tensor& flat, const at::Tensor& own,
                             const std::string& what) const {
  if (own.numel() == 0) return;
  const auto target = backend(flat.device());
  // Gloo accepts only one dimension.
  at::Tensor all = flat.view(-1).view(at::kByte);
  at::Tensor part = own.view(-1).view(at::kByte);
  named(what, [&] { wait_for(target->_allgather_base(all, part, c10d::AllgatherOptions())); });
}

void Collectives::broadcast_all(const std::vector<at::Tensor>& tensors,
                                const std::string& what) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> left;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) left.push_back(tensor);
  }
  while (!left.empty()) {
    std::vector<at::Tensor> members;
    std::vector<at::Tensor> pieces;
    std::size_t bytes = 0;
    const auto options = left.front().options();
    std::erase_if(left, [&](const at::Tensor& tensor) {
      const bool fits = tensor.dtype() == options.dtype() && tensor.device() == options.device() &&
                        bytes < kBytesAtATime;
      if (!fits) return false;
      members.push_back(tensor);
      pieces.push_back(tensor.detach().reshape({-1}));
      bytes += tensor.nbytes();
      return true;
    });
    const at::Tensor packed = at::cat(pieces);
    broadcast(packed, what);
    if (rank() == 0) {
      // Bump the version on rank 0, too. Otherwise only other ranks' saved tensors are out of date,
      // and rank 0 waits in backward for ranks that have thrown.
      for (const at::Tensor& member : members) torch::autograd::impl::bump_version(member);
      continue;
    }
    std::int64_t offset = 0;
    for (const at::Tensor& member : members) {
      member.copy_(packed.narrow(0, offset, member.numel()).view(member.sizes()));
      offset += member.numel();
    }
  }
}

std::vector<std::string> gather_texts(const Collectives& collectives, const c10::Device& device,
                                      const std::string& mine, const std::string& what) {
  const std::int64_t ranks = collectives.size();
  const auto length = static_cast<std::int64_t>(mine.size());
  at::Tensor lengths = at::empty({ranks}, at::TensorOptions(at::kLong).device(device));
  collectives.all_gather(lengths, at::full({1}, length, lengths.options()), what);
  lengths = lengths.cpu();
  const std::int64_t longest = lengths.max().item<std::int64_t>();
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  if (longest == 0) return texts;
  at::Tensor own = at::zeros({longest}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), mine.data(), mine.size());
  at::Tensor all = at::empty({ranks, longest}, at::TensorOptions(at::kByte).device(device));
  collectives.all_gather(all, own.to(device), what);
  all = all.cpu();
  const auto* next = static_cast<const char*>(all.const_data_ptr());
  for (std::int64_t rank = 0; rank < ranks; ++rank, next += longest) {
    const auto size = static_cast<std::size_t>(lengths.const_data_ptr<std::int64_t>()[rank]);
    texts[static_cast<std::size_t>(rank)].assign(next, size);
  }
  return texts;
}

void check_agreement(const Collectives& collectives, const c10::Device& device,
                     const char* expected, const std::string& summary,
                     const std::function<std::vector<std::string>()>& lines) {
  if (collectives.size() == 1) return;
  if (collectives.agree(device, checksum(summary), kComparison)) return;
  std::string text;
  for (const std::string& line : lines()) text += line + "\n";
  const auto texts = gather_texts(collectives, device, text, kComparison);
  const auto other = std::find_if(texts.begin(), texts.end(),
                                  [&](const std::string& text) { return text != texts.front(); });
  TORCH_INTERNAL_ASSERT(other != texts.end(), "summaries differ where lines do not.");
  const auto first = split_lines(texts.front());
  const auto second = split_lines(*other);
  const auto [mine, theirs] =
      std::mismatch(first.begin(), first.end(), second.begin(), second.end());
  TORCH_CHECK_VALUE(
      false, collectives.who(), ": expected ", expected, " to be the same on all ranks, got ",
      mine == first.end() ? "nothing more" : *mine, " on rank 0 and ",
      theirs == second.end() ? "nothing more" : *theirs, " on rank ", other - texts.begin(),
      ". Use the same model, options and calls in every process.");
}

}  // namespace torchfuse::parallel
