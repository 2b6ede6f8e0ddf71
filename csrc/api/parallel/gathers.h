// SPDX-License-Identifier: BSD-3-Clause
// Brings to all processes what each has updated: in a step, or beside the next forward pass.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "api/parallel/collectives.h"
#include "api/parallel/partition.h"

namespace torchfuse::parallel {

/// A module whose forward pass waits for its parameters, and which these are.
struct GatherUnit {
  std::weak_ptr<const torch::nn::Module> module;
  std::vector<std::size_t> members;  ///< indices of its parameters, not empty
};

/// The parameters of each flat tensor where gradients are whole: those of a unit, of a device and a
/// dtype, and those of no unit. What several units have is the first one's.
std::vector<std::vector<std::size_t>> plan_units(const std::vector<at::Tensor>& params,
                                                 const std::vector<GatherUnit>& units);

/// Threads may wait at the same time, such as one that saves the model beside its forward pass.
class Gathers {
 public:
  /// @param units in the order in which they run.
  Gathers(Collectives collectives, const Partition& partition, const std::vector<at::Tensor>& flats,
          std::vector<GatherUnit> units);
  ~Gathers() { leave(); }
  Gathers(const Gathers&) = delete;
  Gathers& operator=(const Gathers&) = delete;
  Gathers(Gathers&&) = delete;
  Gathers& operator=(Gathers&&) = delete;

  /// Begins all gathers, in the units' order, and ends those that no unit waits for. A unit that
  /// has not waited since the last call does not wait: something else reads its parameters. What
  /// was begun before has been finished.
  void run();
  /// Waits for everything. What has failed once fails again: the parameters are of different steps.
  void finish();
  /// Waits for the parameters of a unit. A module that has none of the parameters is a copy of one,
  /// and waits for nothing.
  void finish(const torch::nn::Module& module);
  /// Waits for everything, whether it fails or not: nothing arrives any more.
  void settle();
  /// Waits for what is under way, since the model stays when its optimizer goes; not while an
  /// exception unwinds the stack: then whoever uses the parameters next waits. Warns of what has
  /// not arrived.
  void leave() noexcept;
  /// Whether the optimizer is gone.
  bool has_left() const { return left_; }
  /// Whether some of these tensors lie in the flat tensors.
  bool has(const std::vector<at::Tensor>& tensors) const;

 private:
  struct Flat {
    at::Tensor whole;
    at::Tensor own;
    Pending pending;
    std::string failure;  ///< of the last gather; empty: none
  };
  struct Waiting {
    std::weak_ptr<const torch::nn::Module> module;
    std::vector<std::size_t> flats;
    bool called = false;
  };
  // With the lock.
  void start_all();
  void settle(const std::vector<std::size_t>& flats);
  void finish(const std::vector<std::size_t>& flats);
  bool is_complete() const;
  void leave_behind();

  std::mutex mutex_;
  Collectives collectives_;
  std::atomic<bool> left_ = false;
  int exceptions_ = std::uncaught_exceptions();  ///< at construction
  std::vector<Flat> flats_;
  std::vector<Waiting> units_;
  std::vector<std::size_t> early_;  ///< flat tensors that no unit waits for
  std::vector<std::size_t> all_;    ///< these, and the others in the units' order
};

/// Lets finish_gathers_of() find it, as long as it exists.
void remember(const std::shared_ptr<Gathers>& gathers);
/// Waits for tensors that are to be read, and that the modules of an optimizer have not waited for
/// yet.
void finish_gathers_of(const std::vector<at::Tensor>& tensors);
/// Waits for tensors that are to be overwritten: nothing arrives any more, and what has failed does
/// not matter.
void settle_gathers_of(const std::vector<at::Tensor>& tensors);

}  // namespace torchfuse::parallel
