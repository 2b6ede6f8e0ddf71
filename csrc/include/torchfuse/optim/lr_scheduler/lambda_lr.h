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

/// Factors by epoch: one function for all parameter groups, or one for each.
class TORCHFUSE_API LRLambdas {
 public:
  using Function = std::function<double(std::int64_t)>;  ///< from the epoch to a factor

  /// One function for all groups.
  // NOLINTNEXTLINE(google-explicit-constructor)
  template <class Callable>
    requires std::is_invocable_r_v<double, Callable, std::int64_t>
  LRLambdas(Callable function) : functions_{Function(std::move(function))} {}
  /// One function for each group.
  // NOLINTNEXTLINE(google-explicit-constructor)
  LRLambdas(std::vector<Function> functions) : functions_(std::move(functions)), each_(true) {}

 private:
  friend class LambdaLR;
  friend class MultiplicativeLR;
  /// One function for each of `groups`. Throws, naming `owner`, for another number or an empty one.
  std::vector<Function> per_group(const char* owner, std::size_t groups) const;

  std::vector<Function> functions_;
  bool each_ = false;
};

/// The base rate times a function of the epoch, as torch.optim.lr_scheduler.LambdaLR:
/// lr = base_lr * lr_lambda(epoch). The functions are not part of the state.
///
///     LambdaLR scheduler(optimizer, [](std::int64_t epoch) { return std::pow(0.95, epoch); });
class TORCHFUSE_API LambdaLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param lr_lambda factors by epoch.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error unless there are one or as many functions as groups.
  LambdaLR(torch::optim::Optimizer& optimizer, const LRLambdas& lr_lambda,
           std::int64_t last_epoch = -1);

 protected:
  /// The formula above.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Adds `lr_lambdas`, which is empty of functions.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::vector<LRLambdas::Function> lr_lambdas_;
};

/// The last rate times a function of the epoch, as torch.optim.lr_scheduler.MultiplicativeLR:
/// lr = lr * lr_lambda(epoch), from epoch 1 on. The functions are not part of the state.
class TORCHFUSE_API MultiplicativeLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param lr_lambda factors by epoch.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error unless there are one or as many functions as groups.
  MultiplicativeLR(torch::optim::Optimizer& optimizer, const LRLambdas& lr_lambda,
                   std::int64_t last_epoch = -1);

 protected:
  /// The formula above.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Adds `lr_lambdas`, which is empty of functions.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::vector<LRLambdas::Function> lr_lambdas_;
};

}  // namespace torchfuse::optim
