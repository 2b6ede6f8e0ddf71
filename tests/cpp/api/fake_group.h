// SPDX-License-Identifier: BSD-3-Clause
// Groups of two ranks in one process: the other rank is a backend that does what the test says.
#pragma once

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace torchfuse::testing {

/// Has ended; waiting for it counts, and throws `failure` unless that is empty.
class EndedWork : public c10d::Work {
 public:
  EndedWork(int* waits, std::string failure) : waits_(waits), failure_(std::move(failure)) {}
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override {
    ++*waits_;
    if (!failure_.empty()) throw std::runtime_error(failure_);
    return true;
  }

 private:
  int* waits_;
  std::string failure_;
};

/// Rank 0 of two. Whatever it starts has ended.
class FakeBackend : public c10d::Backend {
 public:
  explicit FakeBackend(std::string name = "fake")
      : c10d::Backend(/*rank=*/0, /*size=*/2), name_(std::move(name)) {}
  const std::string getBackendName() const override { return name_; }

  bool gives_work = true;  ///< NCCL's gives none for what is not asynchronous
  std::string failure;     ///< what waiting throws
  int works = 0;
  int waits = 0;

 protected:
  c10::intrusive_ptr<c10d::Work> work(bool async = false) {
    if (!gives_work && !async) return {};
    ++works;
    return c10::make_intrusive<EndedWork>(&waits, failure);
  }

 private:
  std::string name_;
};

/// A group whose rank 0 is this process.
inline c10::intrusive_ptr<c10d::ProcessGroup> group_over(
    const c10::intrusive_ptr<c10d::Backend>& backend, const std::string& name) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/2);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName(name);
  return group;
}

/// Such a group under its name, as long as this lives. The registry does not keep it alive.
class RegisteredGroup {
 public:
  RegisteredGroup(const c10::intrusive_ptr<c10d::Backend>& backend, std::string name)
      : group_(group_over(backend, name)), name_(std::move(name)) {
    c10d::register_process_group(name_, group_);
  }
  ~RegisteredGroup() { c10d::unregister_process_group(name_); }
  RegisteredGroup(const RegisteredGroup&) = delete;
  RegisteredGroup& operator=(const RegisteredGroup&) = delete;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
};

}  // namespace torchfuse::testing
