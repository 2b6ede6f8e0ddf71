// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/ranks.h"

#include <c10/util/Exception.h>

#include "api/message_of.h"

namespace torchfuse::checkpoint {

Ranks::Ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& caller) {
  if (group) collectives_.emplace(group, caller);
}

std::vector<std::string> Ranks::gather(const std::string& mine) const {
  if (!collectives_) return {mine};
  const c10::Device device(collectives_->has_cpu() ? at::kCPU : at::kCUDA);
  return parallel::gather_texts(*collectives_, device, mine, "this call");
}

void Ranks::all_or_none(const std::function<void()>& action) const {
  std::string failure;
  try {
    action();
  } catch (const std::exception& error) {
    if (size() == 1) throw;
    failure = message_of(error);
  }
  for (const std::string& each : gather(failure)) TORCH_CHECK_VALUE(each.empty(), each);
}

}  // namespace torchfuse::checkpoint
