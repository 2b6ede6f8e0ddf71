// SPDX-License-Identifier: BSD-3-Clause
// What one step gives the prologue and what the prologue leaves, on the CPU and on the device.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "device.h"
#include "gradient_list.h"
#include "kernels/prologue.h"

namespace torchfuse::kernels::testing {

struct Step {
  std::optional<float> grad_scale = std::nullopt;
  std::optional<float> found_inf = std::nullopt;
  bool found_inf_is_output = false;
  bool check = false;
  bool has_norm = true;
  double max_grad_norm = -1.0;
  std::vector<NormPartial> partials = {};
  const NormPartial* sums_elsewhere = nullptr;  ///< instead of them: those that a kernel writes
  std::int64_t num_sums_elsewhere = 0;
  std::vector<float> counts = {};  ///< of steps, one for each parameter
  bool scattered = false;          ///< on the device none lies behind the one before it
};

struct Outcome {
  StepScalars scalars;
  float found_inf;
  std::vector<float> counts;
};

inline void expect_same_outcome(const Outcome& actual, const Outcome& expected) {
  EXPECT_TRUE(same_value(actual.scalars.grad_coef, expected.scalars.grad_coef))
      << "coefficients " << actual.scalars.grad_coef << " and " << expected.scalars.grad_coef;
  EXPECT_TRUE(same_value(actual.scalars.total_norm, expected.scalars.total_norm))
      << "norms " << actual.scalars.total_norm << " and " << expected.scalars.total_norm;
  EXPECT_EQ(actual.scalars.skip, expected.scalars.skip);
  EXPECT_TRUE(same_value(actual.found_inf, expected.found_inf)) << "found_inf " << actual.found_inf;
  EXPECT_EQ(actual.counts, expected.counts);
}

/// The arguments for a step whose values lie where the pointers point.
inline PrologueArgs prologue_args(const Step& step, const float* grad_scale, float* found_inf,
                                  StepScalars* scalars, const std::vector<float*>& counts) {
  PrologueArgs args;
  args.params.grad_scale = step.grad_scale ? grad_scale : nullptr;
  args.params.found_inf = step.found_inf ? found_inf : nullptr;
  args.params.found_inf_is_output = step.found_inf_is_output;
  args.params.check = step.check;
  args.params.has_norm = step.has_norm;
  args.params.max_grad_norm = step.max_grad_norm;
  args.num_partials = step.num_sums_elsewhere + static_cast<std::int64_t>(step.partials.size());
  args.scalars = scalars;
  args.steps = counts.data();
  args.num_steps = static_cast<std::int64_t>(counts.size());
  return args;
}

inline Outcome prologue_on_cpu(Step step) {
  Outcome outcome{{-1.0, -1.0f, -1.0f}, step.found_inf.value_or(0.0f), step.counts};
  std::vector<float*> counts;
  for (float& count : outcome.counts) counts.push_back(&count);
  const float grad_scale = step.grad_scale.value_or(0.0f);
  PrologueArgs args =
      prologue_args(step, &grad_scale, &outcome.found_inf, &outcome.scalars, counts);
  args.partials = step.partials.data();
  prologue_cpu(args);
  return outcome;
}

/// A step's memory on the device.
class DeviceStep {
 public:
  explicit DeviceStep(const Step& step)
      : step_(step),
        grad_scale_({step.grad_scale.value_or(0.0f)}),
        found_inf_({step.found_inf.value_or(0.0f)}),
        scalars_(DeviceArray<StepScalars>::unwritten(1)),
        partials_(step.partials),
        counts_(step.counts) {
    for (std::size_t i = 0; i < step.counts.size(); ++i)
      count_pointers_.push_back(counts_.data() + i);
    if (!step.scattered) return;
    std::stable_partition(count_pointers_.begin(), count_pointers_.end(),
                          [&](float* count) { return (count - counts_.data()) % 2 == 0; });
  }

  PrologueArgs args() const {
    PrologueArgs args = prologue_args(step_, grad_scale_.data(), found_inf_.data(), scalars_.data(),
                                      count_pointers_);
    args.partials = step_.sums_elsewhere == nullptr ? partials_.data() : step_.sums_elsewhere;
    return args;
  }

  Outcome outcome() const {
    for (const DeviceMemory* memory : std::initializer_list<const DeviceMemory*>{
             &grad_scale_, &found_inf_, &scalars_, &partials_, &counts_}) {
      memory->expect_margins_intact();
    }
    return {scalars_.to_host()[0], found_inf_.to_host()[0], counts_.to_host()};
  }

  /// After `launches` prologues: every count grew once in each, or was left alone, and every
  /// partial was read once in each.
  void expect_single_accesses(unsigned launches) const {
    const bool skipped = scalars_.to_host()[0].skip != 0.0f;
    const unsigned grown = skipped ? 0 : launches;
    counts_.expect_accesses(grown, grown);
    partials_.expect_accesses(launches, 0);
  }

 private:
  Step step_;
  DeviceArray<float> grad_scale_;
  DeviceArray<float> found_inf_;
  DeviceArray<StepScalars> scalars_;
  DeviceArray<NormPartial> partials_;
  DeviceArray<float> counts_;
  std::vector<float*> count_pointers_;
};

/// The prologue as a kernel of its own.
inline Outcome prologue_on_device(const Step& step) {
  const DeviceStep device(step);
  expect_ok(prologue_cuda(device.args(), stream()));
  device.expect_single_accesses(1);
  return device.outcome();
}

}  // namespace torchfuse::kernels::testing
