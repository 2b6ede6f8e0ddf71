// SPDX-License-Identifier: BSD-3-Clause
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/cuda.h>
#include <torchfuse/missing_ranks.h>
#include <torchfuse/parallel/process_group.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "api/message_of.h"
#include "api/parallel/collectives.h"
#include "api/parallel/rendezvous.h"

namespace torchfuse::parallel {

struct ProcessGroup::State {
  std::string name;
  std::string backend;
  std::chrono::milliseconds timeout{};
  std::chrono::milliseconds leave_timeout{};
  RankInfo self{};
  bool serves = false;  ///< whether this process serves the store
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> group;  ///< null after close()
  bool registered = false;
  std::vector<std::weak_ptr<State>> children;
  std::int64_t calls_of_new_group = 0;
  int exceptions = std::uncaught_exceptions();  ///< exceptions in flight at construction

  void connect(const std::string& terms);
  void close() noexcept;
};

void ProcessGroup::State::connect(const std::string& terms) {
  store->setTimeout(timeout);
  try {
    wait_for_all(*store, self, timeout, name, terms);
  } catch (const c10::DistError& error) {
    TORCH_CHECK(false, kInit, ": expected the store of group '", name, "' to answer within ",
                to_string(timeout), ", got: ", clause_of(error), ". Rank 0 may have exited.");
  }
  auto joined = c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(self.rank),
                                                        static_cast<int>(self.world_size));
  const BackendArguments arguments{store, self, timeout, name};
  backend == "nccl" ? add_nccl(*joined, arguments) : add_gloo(*joined, arguments);
  joined->setGroupName(name);
  try {
    c10d::register_process_group(name, joined);
  } catch (const std::exception& error) {
    TORCH_CHECK_VALUE(false, kInit, ": expected name to differ from all other groups' names, got '",
                      name, "' (", clause_of(error), "). Give each group its own name.");
  }
  registered = true;
  group = std::move(joined);
}

// noexcept because a destructor calls close(). Errors become warnings.
void ProcessGroup::State::close() noexcept {
  for (const auto& weak : children) {
    if (const auto child = weak.lock()) child->close();
  }
  children.clear();
  if (!group) return;
  const bool unwinding = std::uncaught_exceptions() > exceptions;
  if (!unwinding) leave_after_all_ranks(*store, self, leave_timeout, name, serves);
  try {
    if (registered) c10d::unregister_process_group(name);
    unwinding ? group->abort() : group->shutdown();
  } catch (const std::exception& error) {
    TORCH_WARN("torchfuse::parallel::ProcessGroup: closing group '", name, "': ", clause_of(error),
               ".");
  }
  registered = false;
  group.reset();
  store.reset();
}

ProcessGroup::ProcessGroup(std::shared_ptr<State> state) : state_(std::move(state)) {}
ProcessGroup::ProcessGroup(ProcessGroup&& other) noexcept = default;
ProcessGroup& ProcessGroup::operator=(ProcessGroup&& other) noexcept {
  if (this == &other) return *this;
  close();
  state_ = std::move(other.state_);
  return *this;
}
ProcessGroup::~ProcessGroup() { close(); }

void ProcessGroup::close() {
  if (state_) state_->close();
}

bool ProcessGroup::is_open() const noexcept { return state_ && state_->group; }

ProcessGroup::State& ProcessGroup::state() const {
  TORCH_CHECK(state_ != nullptr,
              "torchfuse::parallel::ProcessGroup: expected a process group, got "
              "a moved-from object.");
  TORCH_CHECK(state_->group, "torchfuse::parallel::ProcessGroup: expected group '", state_->name,
              "' to be open, got a closed group. Keep the ProcessGroup, and the group whose "
              "new_group() made it, open while you use it.");
  return *state_;
}

std::int64_t ProcessGroup::rank() const { return state().self.rank; }
std::int64_t ProcessGroup::world_size() const { return state().self.world_size; }
std::int64_t ProcessGroup::local_rank() const { return state().self.local_rank; }
const std::string& ProcessGroup::name() const { return state().name; }
const std::string& ProcessGroup::backend() const { return state().backend; }
std::chrono::milliseconds ProcessGroup::timeout() const { return state().timeout; }
const c10::intrusive_ptr<c10d::ProcessGroup>& ProcessGroup::get() const { return state().group; }

std::optional<ProcessGroup> ProcessGroup::new_group(std::vector<std::int64_t> ranks) {
  constexpr const char* kName = "torchfuse::parallel::ProcessGroup::new_group";
  State& parent = state();
  std::sort(ranks.begin(), ranks.end());
  TORCH_CHECK_VALUE(!ranks.empty(), kName, ": expected ranks not to be empty.");
  TORCH_CHECK_VALUE(ranks.front() >= 0 && ranks.back() < parent.self.world_size, kName,
                    ": expected ranks to be at least 0 and below the world size ",
                    parent.self.world_size, " of group '", parent.name, "', got ", rank_list(ranks),
                    ".");
  TORCH_CHECK_VALUE(std::adjacent_find(ranks.begin(), ranks.end()) == ranks.end(), kName,
                    ": expected ranks without duplicates, got ", rank_list(ranks), ".");
  // Every process counts the call, including processes outside the new group.
  const std::string number = std::to_string(parent.calls_of_new_group++);
  const auto place = std::lower_bound(ranks.begin(), ranks.end(), parent.self.rank);
  if (place == ranks.end() || *place != parent.self.rank) return std::nullopt;
  auto child = std::make_shared<State>();
  child->name = parent.name + "/" + number;
  child->backend = parent.backend;
  child->timeout = parent.timeout;
  child->leave_timeout = parent.leave_timeout;
  child->self = {place - ranks.begin(), static_cast<std::int64_t>(ranks.size()),
                 parent.self.local_rank};
  child->store = c10::make_intrusive<c10d::PrefixStore>("group_" + number, parent.store);
  child->connect(rank_list(ranks));
  parent.children.emplace_back(child);
  return ProcessGroup(std::move(child));
}

void ProcessGroup::barrier() {
  State& now = state();
  c10d::BarrierOptions options;
  options.timeout = now.timeout;
  if (now.backend == "nccl") options.device_ids = {now.self.local_rank};
  try {
    const auto device = now.backend == "nccl" ? c10::kCUDA : c10::kCPU;
    wait_for(now.group->getBackend(device)->barrier(options));
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "torchfuse::parallel::ProcessGroup::barrier: expected all ranks of group '",
                now.name, "' to call barrier() within ", to_string(now.timeout),
                ", got: ", clause_of(error), ".");
  }
}

namespace {

std::string backend_of(const ProcessGroupOptions& options) {
  if (!options.backend()) {
    return has_nccl() && torch::cuda::is_available() ? "nccl" : "gloo";
  }
  const std::string& backend = *options.backend();
  TORCH_CHECK_VALUE(backend == "gloo" || backend == "nccl", kInit,
                    ": expected backend to be \"gloo\" or \"nccl\", got \"", backend, "\".");
  TORCH_CHECK_VALUE(
      backend == "gloo" || has_nccl(), kInit,
      ": expected backend to be \"gloo\" in a build without NCCL, got \"nccl\". Build "
      "torchfuse with TORCHFUSE_WITH_CUDA=ON against a CUDA build of torch.");
  return backend;
}

/// Returns how often the process has joined a group with the given name and rank. A store keeps a
/// closed group's keys, and a new group with the same name must not read them.
int generation_of(const std::string& name, std::int64_t rank) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, std::int64_t>, int> counts;
  const std::lock_guard lock(mutex);
  return counts[{name, rank}]++;
}

}  // namespace

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  const std::string backend = backend_of(options);
  const RankInfo self = read_rank_info(options, /*read_environment=*/true);
  const Rendezvous rendezvous = join_rendezvous(options, self);
  ProcessGroupOptions complete = options;
  complete.backend(backend).rank(self.rank).world_size(self.world_size).local_rank(self.local_rank);
  ProcessGroup group = init_process_group(rendezvous.store, complete);
  group.state_->serves = rendezvous.serves;
  return group;
}

ProcessGroup init_process_group(c10::intrusive_ptr<c10d::Store> store,
                                const ProcessGroupOptions& options) {
  TORCH_CHECK_VALUE(store, kInit, ": expected a store, got a null pointer.");
  auto state = std::make_shared<ProcessGroup::State>();
  state->backend = backend_of(options);
  state->self = read_rank_info(options, /*read_environment=*/false);
  state->name = options.name();
  state->timeout = options.timeout();
  state->leave_timeout = options.leave_timeout();
  const int generation = generation_of(state->name, state->self.rank);
  state->store = c10::make_intrusive<c10d::PrefixStore>(c10::str(state->name, "/", generation),
                                                        std::move(store));
  state->connect(c10::str("world size ", state->self.world_size));
  return ProcessGroup(std::move(state));
}

}  // namespace torchfuse::parallel
