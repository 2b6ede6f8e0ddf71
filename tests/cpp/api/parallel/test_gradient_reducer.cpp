// SPDX-License-Identifier: BSD-3-Clause
// Gradients of a model that nobody wraps are reduced to parts while backward runs.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <memory>
#include <string>
#include <vector>

#include "../optim/optim_testing.h"
#include "parallel_testing.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using parallel::GradientReducer;
using parallel::ProcessGroup;
using testing::error_of;
using Members = std::vector<std::vector<std::size_t>>;

/// Two parameters of 64 and 16 floats. Of two ranks each has 32 elements of the first; the second
/// lies in the first rank's part of its bucket.
struct Reduced {
  explicit Reduced(ProcessGroup& group, bool find_unused = false)
      : rank(group.rank()),
        parts({torch::zeros({32}), torch::zeros({rank == 0 ? 16 : 0})}),
        reducer(std::make_unique<GradientReducer>(std::vector<std::string>{"first", "second"},
                                                  params, parts, Members{{1}, {0}}, group.get(),
                                                  find_unused)) {}

  /// A gradient of 1, 2, ... times the rank's number, for each element.
  torch::Tensor loss() const {
    const auto factor = static_cast<double>(rank + 1);
    return (params[0] * torch::arange(1, 65)).sum() * factor +
           (params[1] * torch::arange(1, 17)).sum() * factor;
  }
  /// What one backward() gives, times `times`.
  void expect_averages(double times) const {
    const torch::Tensor begin = torch::arange(1, 65, torch::kFloat) * 1.5 * times;
    EXPECT_TRUE(torch::equal(parts[0].grad(), begin.narrow(0, 32 * rank, 32)));
    const auto own = rank == 0 ? 16 : 0;
    EXPECT_TRUE(torch::equal(parts[1].grad(), begin.narrow(0, 0, own)));
    for (const torch::Tensor& param : params) EXPECT_FALSE(param.grad().defined());
  }

  std::int64_t rank;
  std::vector<torch::Tensor> params{torch::ones({64}, torch::requires_grad()),
                                    torch::ones({16}, torch::requires_grad())};
  std::vector<torch::Tensor> parts;
  std::unique_ptr<GradientReducer> reducer;
};

TEST(GradientReducer, EachBackwardAddsToTheParts) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const Reduced reduced(group);
    reduced.loss().backward();
    reduced.expect_averages(1.0);
    reduced.loss().backward();
    reduced.expect_averages(2.0);
  });
}

TEST(GradientReducer, WithoutSyncGradientsStayUntilTheNextReduction) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const Reduced reduced(group);
    reduced.reducer->set_sync(false);
    reduced.loss().backward();
    reduced.loss().backward();
    EXPECT_TRUE(reduced.params[0].grad().defined());
    EXPECT_FALSE(reduced.parts[0].grad().defined());
    reduced.reducer->set_sync(true);
    reduced.loss().backward();
    reduced.expect_averages(3.0);
  });
}

TEST(GradientReducer, TheDestructorRemovesTheHooks) {
  run_on_ranks(1, [](ProcessGroup& group) {
    const torch::Tensor param = torch::ones({16}, torch::requires_grad());
    {
      const GradientReducer reducer({"param"}, {param}, {torch::zeros({16})}, {{0}}, group.get());
      param.sum().backward();
      EXPECT_FALSE(param.grad().defined());
    }
    param.sum().backward();
    EXPECT_TRUE(torch::equal(param.grad(), torch::ones({16})));
  });
}

TEST(GradientReducer, ParametersThatNoRankUsesKeepNone) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const Reduced reduced(group, /*find_unused=*/true);
    (reduced.params[0].sum() * 1.0).backward();
    EXPECT_TRUE(torch::equal(reduced.parts[0].grad(), torch::ones({32})));
    EXPECT_FALSE(reduced.parts[1].grad().defined());
  });
}

TEST(GradientReducer, WhatZeroGradDroppedIsNotUsed) {
  run_on_ranks(2, [](ProcessGroup& group) {
    Reduced reduced(group, /*find_unused=*/true);
    reduced.reducer->set_sync(false);
    reduced.loss().backward();
    for (torch::Tensor& param : reduced.params) param.mutable_grad().reset();
    reduced.reducer->set_sync(true);
    (reduced.params[0].sum() * 1.0).backward();
    EXPECT_TRUE(torch::equal(reduced.parts[0].grad(), torch::ones({32})));
    EXPECT_FALSE(reduced.parts[1].grad().defined());
  });
}

TEST(GradientReducer, AGradientThatTheProgramSetIsReducedWithoutBackward) {
  run_on_ranks(2, [](ProcessGroup& group) {
    Reduced reduced(group, /*find_unused=*/true);
    if (group.rank() == 1) reduced.params[1].mutable_grad() = torch::full({16}, 4.0);
    (reduced.params[0].sum() * 1.0).backward();
    EXPECT_FALSE(reduced.params[1].grad().defined());
    EXPECT_TRUE(torch::equal(reduced.parts[1].grad(), torch::full_like(reduced.parts[1], 2.0)));
  });
}

TEST(GradientReducer, MessagesOfTheProgramStayApart) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const Reduced reduced(group);
    const auto other = static_cast<int>(1 - group.rank());
    std::vector<at::Tensor> sent{torch::full({32}, 7.0)};
    std::vector<at::Tensor> received{torch::zeros({32})};
    // As large as a part of the second bucket.
    const auto sending = group.get()->send(sent, other, 1);
    reduced.loss().backward();
    reduced.expect_averages(1.0);
    group.get()->recv(received, other, 1)->wait();
    sending->wait();
    EXPECT_TRUE(torch::equal(received[0], sent[0]));
  });
}

TEST(GradientReducer, PlansBucketsFromTheLastParameterOn) {
  const std::vector<torch::Tensor> params{torch::ones({8}), torch::ones({2}, torch::kDouble),
                                          torch::ones({4}), torch::ones({4})};
  EXPECT_EQ(GradientReducer::plan(params, 16, 32), (Members{{3}, {1}, {2, 0}}));
}

TEST(GradientReducerErrors, ABackwardThatEndedEarlyIsNotForgotten) {
  run_on_ranks(1, [](ProcessGroup& group) {
    std::vector<torch::Tensor> params{torch::ones({16}, torch::requires_grad()),
                                      torch::ones({16}, torch::requires_grad())};
    GradientReducer reducer({"a", "b"}, params, {torch::zeros({16}), torch::zeros({16})},
                            {{1}, {0}}, group.get(), false, "Who");
    // The node that is recorded last runs first.
    const torch::Tensor first = params[0] * 2.0;
    first.register_hook([](const torch::Tensor& grad) {
      TORCH_CHECK(false, "ended");
      return grad;
    });
    const torch::Tensor loss = first.sum() + (params[1] * 2.0).sum();
    EXPECT_ERROR([&] { loss.backward(); }, "ended");
    const std::string early = "Who: expected the last backward() to reach its end, got one that ";
    EXPECT_ERROR([&] { reducer.check_ended(); }, early);
    EXPECT_ERROR([&] { reducer.set_sync(false); }, early);
    EXPECT_ERROR([&] { (params[0].sum() + params[1].sum()).backward(); },
                 "Who: expected one backward() to reach its end before another gives gradients, ");
  });
}

TEST(GradientReducerErrors, WhatTheConstructorIsGiven) {
  run_on_ranks(1, [](ProcessGroup& group) {
    const std::vector<torch::Tensor> params{torch::ones({16}), torch::ones({4}, torch::kDouble)};
    const std::vector<torch::Tensor> parts{torch::ones({16}), torch::ones({4}, torch::kDouble)};
    const auto make = [&](std::vector<std::string> names, std::vector<torch::Tensor> own,
                          const Members& members) {
      return error_of([&] { GradientReducer(names, params, own, members, group.get()); });
    };
    const auto expect = [](const std::string& error, const std::string& text) {
      EXPECT_PRED_FORMAT2(::testing::IsSubstring, text, error);
    };
    expect(make({"a"}, parts, {{0}, {1}}), "expected a name and a part for each parameter, got 2");
    expect(make({"a", "b"}, parts, {{0}}), "to be each of 2 parameters once, got 1 of them.");
    expect(make({"a", "b"}, parts, {{0}, {0}}), "each of 2 parameters once, got 0 twice.");
    expect(make({"a", "b"}, parts, {{0}, {2}}), "each of 2 parameters once, got 2.");
    expect(make({"a", "b"}, parts, {{0, 1}}), "to be of one dtype and device, got Float on cpu ");
    expect(make({"a", "b"}, parts, {{0}, {}, {1}}), "expected buckets with members, got one ");
    expect(make({"a", "b"}, {parts[0], parts[0]}, {{0}, {1}}), "expected parts[1] to be of one ");
    expect(make({"a", "b"}, {parts[0], torch::ones({4})}, {{0}, {1}}),
           "expected parts[1] to have the dtype and device of its parameter, Double on cpu, got ");
    const std::vector<torch::Tensor> gaps{torch::ones({4, 8}).narrow(1, 0, 4)};
    expect(
        error_of([&] { GradientReducer({"a"}, gaps, {torch::ones({16})}, {{0}}, group.get()); }),
        "expected params[0] to be dense, without gaps or overlap in memory, got layout Strided ");
  });
}

}  // namespace
}  // namespace torchfuse::sharded_testing
