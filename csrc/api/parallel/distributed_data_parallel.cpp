// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torchfuse/parallel/distributed_data_parallel.h>

#include <unordered_set>

#include "api/parallel/collectives.h"
#include "api/parallel/reducer.h"

namespace torchfuse::parallel {

namespace {

constexpr const char* kDataParallel = "torchfuse::parallel::DistributedDataParallel";

/// "parameter 'fc.weight' Float [3, 4]"
std::string describe(const char* kind, const std::string& name, const at::Tensor& tensor) {
  return c10::str(kind, " '", name, "' ", tensor.scalar_type(), " ", tensor.sizes());
}

}  // namespace

struct DataParallelBase::Replica {
  explicit Replica(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
      : collectives(group, kDataParallel) {}

  Collectives collectives;
  std::vector<at::Tensor> buffers;  ///< broadcast by each forward
  std::vector<at::Tensor> all_buffers;
  std::shared_ptr<bool> sync = std::make_shared<bool>(true);
  std::shared_ptr<Reducer> reducer;
};

namespace {

void check_options(const DistributedDataParallelOptions& options) {
  TORCH_CHECK_VALUE(options.first_bucket_bytes() > 0, kDataParallel,
                    ": expected first_bucket_bytes to be positive, got ",
                    options.first_bucket_bytes(), ".");
  TORCH_CHECK_VALUE(options.bucket_bytes() > 0, kDataParallel,
                    ": expected bucket_bytes to be positive, got ", options.bucket_bytes(), ".");
}

/// Returns the tensors in module order, without duplicates of shared tensors.
NamedTensors distinct(const torch::OrderedDict<std::string, at::Tensor>& items) {
  NamedTensors result;
  std::unordered_set<const void*> seen;
  for (const auto& item : items) {
    if (!item.value().defined()) continue;
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    result.emplace_back(item.key(), item.value());
  }
  return result;
}

/// Returns the buffers of modules for which `keeps_buffers` returns true.
std::unordered_set<const void*> kept_buffers(const torch::nn::Module& module,
                                             const DistributedDataParallelOptions& options) {
  std::unordered_set<const void*> kept;
  if (!options.keeps_buffers()) return kept;
  const auto note = [&](const torch::nn::Module& part) {
    if (!options.keeps_buffers()(part)) return;
    for (const auto& buffer : part.named_buffers(/*recurse=*/false)) {
      kept.insert(buffer.value().unsafeGetTensorImpl());
    }
  };
  note(module);
  for (const auto& child : module.modules(/*include_self=*/false)) note(*child);
  return kept;
}

}  // namespace

DataParallelBase::DataParallelBase(const torch::nn::Module& module,
                                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   const DistributedDataParallelOptions& options)
    : replica_(std::make_unique<Replica>(group)) {
  check_options(options);
  std::vector<std::string> lines;
  std::vector<at::Tensor> state;
  NamedTensors trained;
  for (auto& [name, parameter] : distinct(module.named_parameters())) {
    const bool trains = parameter.requires_grad();
    lines.push_back(describe(trains ? "parameter" : "frozen parameter", name, parameter));
    state.push_back(parameter);
    if (trains) trained.emplace_back(name, parameter);
  }
  TORCH_CHECK_VALUE(!trained.empty(), kDataParallel,
                    ": expected module to have parameters that require gradients, got none. There "
                    "is nothing to average.");
  const auto kept = kept_buffers(module, options);
  for (auto& [name, buffer] : distinct(module.named_buffers())) {
    lines.push_back(describe("buffer", name, buffer));
    state.push_back(buffer);
    replica_->all_buffers.push_back(buffer);
    const bool each_forward = options.broadcast_buffers();
    if (each_forward && kept.count(buffer.unsafeGetTensorImpl()) == 0) {
      replica_->buffers.push_back(buffer);
    }
  }
  const Collectives& collectives = replica_->collectives;
  check_agreement(collectives, trained.front().second.device(), "the parameters and buffers",
                  c10::Join("\n", lines), [&] { return lines; });
  collectives.broadcast_all(state, "the broadcast of parameters and buffers");
  replica_->reducer = std::make_shared<Reducer>(std::move(trained), collectives, options);
  replica_->reducer->install_hooks();
}

DataParallelBase::~DataParallelBase() = default;
DataParallelBase::DataParallelBase(DataParallelBase&&) noexcept = default;
DataParallelBase& DataParallelBase::operator=(DataParallelBase&&) noexcept = default;

DataParallelBase::Replica& DataParallelBase::replica() const {
  TORCH_CHECK(replica_ != nullptr, kDataParallel,
              ": expected a DistributedDataParallel, got a moved-from object.");
  return *replica_;
}

void DataParallelBase::before_forward() {
  const Replica& now = replica();
  if (!at::GradMode::is_enabled()) return;
  const bool sync = *now.sync;
  // Do not overwrite buffers that an earlier forward's graph may still need.
  const bool in_use = now.reducer->awaits_backward();
  now.reducer->before_forward(sync);
  if (sync && !in_use && !now.buffers.empty()) {
    now.collectives.broadcast_all(now.buffers, "the broadcast of buffers");
  }
}

void DataParallelBase::sync_buffers() {
  const Replica& now = replica();
  now.collectives.broadcast_all(now.all_buffers, "the broadcast of buffers");
}

std::vector<std::vector<std::string>> DataParallelBase::buckets() const {
  return replica().reducer->bucket_names();
}

NoSync DataParallelBase::no_sync(bool local) { return {replica().sync, local}; }

NoSync::NoSync(std::shared_ptr<bool> sync, bool local)
    : sync_(std::move(sync)), before_(std::exchange(*sync_, *sync_ && !local)) {}

NoSync::~NoSync() { *sync_ = before_; }

}  // namespace torchfuse::parallel
