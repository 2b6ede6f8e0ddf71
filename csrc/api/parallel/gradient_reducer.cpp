// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/parallel/gradient_reducer.h>

#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "api/parallel/buckets.h"
#include "api/parallel/gradient_parts.h"
#include "api/parallel/reducer.h"

namespace torchfuse::parallel {

namespace {

void check_params(const std::string& who, const std::vector<at::Tensor>& params) {
  for (std::size_t index = 0; index < params.size(); ++index) {
    const at::Tensor& param = params[index];
    TORCH_CHECK_VALUE(param.layout() == at::kStrided && param.is_non_overlapping_and_dense(), who,
                      ": expected params[", index, "] to be dense, without gaps or overlap in ",
                      "memory, got layout ", param.layout(), " and sizes ", param.sizes(),
                      ". Make it of a copy, such as tensor.contiguous().");
  }
}

void check_members(const std::string& who, const std::vector<at::Tensor>& params,
                   const std::vector<std::vector<std::size_t>>& members) {
  std::vector<bool> seen(params.size());
  std::size_t count = 0;
  for (const std::vector<std::size_t>& of_bucket : members) {
    TORCH_CHECK_VALUE(!of_bucket.empty(), who, ": expected buckets with members, got one without.");
    for (const std::size_t index : of_bucket) {
      TORCH_CHECK_VALUE(index < params.size() && !seen[index], who,
                        ": expected members to be each of ", params.size(),
                        " parameters once, got ", index, index < params.size() ? " twice." : ".");
      seen[index] = true;
      ++count;
      const at::Tensor& first = params[of_bucket.front()];
      TORCH_CHECK_VALUE(params[index].scalar_type() == first.scalar_type() &&
                            params[index].device() == first.device(),
                        who, ": expected the members of a bucket to be of one dtype and device, ",
                        "got ", first.scalar_type(), " on ", first.device(), " and ",
                        params[index].scalar_type(), " on ", params[index].device(), ".");
    }
  }
  TORCH_CHECK_VALUE(count == params.size(), who, ": expected members to be each of ", params.size(),
                    " parameters once, got ", count, " of them.");
}

void check_parts(const std::string& who, const GradientParts& parts) {
  for (std::size_t index = 0; index < parts.params().size(); ++index) {
    const auto [begin, end] = parts.partition().own(index);
    const at::Tensor& part = parts.parts()[index];
    TORCH_CHECK_VALUE(part.dim() == 1 && part.numel() == end - begin, who, ": expected parts[",
                      index, "] to be of one dimension and ", end - begin,
                      " elements, which this process owns of the parameter, got sizes ",
                      part.sizes(), ".");
    const at::Tensor& param = parts.params()[index];
    TORCH_CHECK_VALUE(part.scalar_type() == param.scalar_type() && part.device() == param.device(),
                      who, ": expected parts[", index, "] to have the dtype and device of its ",
                      "parameter, ", param.scalar_type(), " on ", param.device(), ", got ",
                      part.scalar_type(), " on ", part.device(), ".");
  }
}

}  // namespace

std::vector<std::vector<std::size_t>> GradientReducer::plan(const std::vector<at::Tensor>& params,
                                                            std::int64_t first_bucket_bytes,
                                                            std::int64_t bucket_bytes) {
  // Backward reaches the last layers first.
  std::vector<std::size_t> order(params.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return plan_buckets(params, order, {first_bucket_bytes, bucket_bytes});
}

GradientReducer::GradientReducer(std::vector<std::string> names, std::vector<at::Tensor> params,
                                 std::vector<at::Tensor> parts,
                                 const std::vector<std::vector<std::size_t>>& members,
                                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                                 bool find_unused_parameters, const std::string& who) {
  TORCH_CHECK_VALUE(names.size() == params.size() && parts.size() == params.size(), who,
                    ": expected a name and a part for each parameter, got ", params.size(),
                    " parameters, ", names.size(), " names and ", parts.size(), " parts.");
  check_params(who, params);
  check_members(who, params, members);
  Collectives collectives(std::move(group), who);
  NamedTensors trained;
  for (std::size_t index = 0; index < params.size(); ++index) {
    if (params[index].requires_grad()) trained.emplace_back(std::move(names[index]), params[index]);
  }
  Partition partition(params, members, collectives.rank(), collectives.size());
  auto kept =
      std::make_shared<GradientParts>(std::move(params), std::move(parts), std::move(partition));
  check_parts(who, *kept);
  reducer_ = std::make_shared<Reducer>(
      std::move(trained), std::move(collectives),
      DistributedDataParallelOptions().find_unused_parameters(find_unused_parameters),
      std::move(kept));
  reducer_->set_sync(true);
  reducer_->install_hooks();
}

GradientReducer::~GradientReducer() = default;

void GradientReducer::set_sync(bool sync) { reducer_->set_sync(sync); }

void GradientReducer::check_ended() const { reducer_->check_ended(); }

}  // namespace torchfuse::parallel
