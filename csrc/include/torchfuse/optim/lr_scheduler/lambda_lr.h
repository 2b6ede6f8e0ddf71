// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Factors by epoch: one function for all parameter groups, or one per group.
class TORCHFUSE_API LRLambdas {
 public:
  using Function = std::function<double(std::int64_t)>;  ///< maps an epoch to a factor

  /// Uses one function for all groups.
  // NOLINTNEXTLINE(google-explicit-constructor)
  template <class Callable>
    requires std::is_invocable_r_v<double, Callable, std::int64_t>
  LRLambdas(Callable function) : functions_{Function(std::move(function))} {}
  /// Uses one function per group.
  // NOLINTNEXTLINE(google-explicit-constructor)
  LRLambdas(std::vector<Function> functions) : functions_(std::move(functions)), each_(true) {}

 private:
  friend class LambdaLR;
  friend class MultiplicativeLR;
  /// Returns one function per group. Throws, naming `owner`, for a wrong count or an empty
  /// function.
  std::vector<Function> per_group(const char* owner, std::size_t groups) const;

  std::vector<Function> functions_;
  bool each_ = false;
};

/// Multiplies the base rate by a function of the epoch, like torch.optim.lr_scheduler.LambdaLR:
/// lr = base_lr * lr_lambda(epoch). Functions are not part of the state.
///
///     LambdaLR scheduler(optimizer, [](std::int64_t epoch) { return std::pow(0.95, epoch); });
class TORCHFUSE_API LambdaLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param lr_lambda one function, or one per group.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error unless there is one function, or one per group, and none is empty.
  LambdaLR(torch::optim::Optimizer& optimizer, const LRLambdas& lr_lambda,
           std::int64_t last_epoch = -1);

 protected:
  /// Computes the formula above.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Adds `lr_lambdas`, without the functions.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::vector<LRLambdas::Function> lr_lambdas_;
};

/// Multiplies the current rate by a function of the epoch, like
/// torch.optim.lr_scheduler.MultiplicativeLR: lr = lr * lr_lambda(epoch), starting at epoch 1.
/// Functions are not part of the state.
///
///     MultiplicativeLR scheduler(optimizer, [](std::int64_t) { return 0.95; });
class TORCHFUSE_API MultiplicativeLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param lr_lambda one function, or one per group.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error unless there is one function, or one per group, and none is empty.
  MultiplicativeLR(torch::optim::Optimizer& optimizer, const LRLambdas& lr_lambda,
                   std::int64_t last_epoch = -1);

 protected:
  /// Computes the formula above.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Adds `lr_lambdas`, without the functions.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::vector<LRLambdas::Function> lr_lambdas_;
};

}  // namespace torchfuse::optim
