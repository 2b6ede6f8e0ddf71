// SPDX-License-Identifier: BSD-3-Clause
// Every class of optimizers, with states that are split over ranks, computes what it does alone.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <torchfuse/torchfuse.h>

#include <string>
#include <type_traits>
#include <vector>

#include "sharded_classes.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using parallel::ProcessGroup;
using parallel::ShardedOptimizer;
using testing::AllClasses;
using testing::ClassNames;

/// Whether each element's update depends on that element alone.
template <class Options>
constexpr bool kElementwise = !(std::is_same_v<Options, optim::FusedLAMBOptions> ||
                                std::is_same_v<Options, optim::FusedNovoGradOptions> ||
                                std::is_same_v<Options, optim::FusedLARSOptions>);

void expect_same(const torch::Tensor& found, const torch::Tensor& expected, bool exactly,
                 double bound, const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  ASSERT_EQ(found.scalar_type(), expected.scalar_type()) << what;
  if (exactly) {
    EXPECT_TRUE(torch::equal(found, expected)) << what;
    return;
  }
  const auto reference = expected.detach().to(torch::kDouble);
  const auto difference = (found.detach().to(torch::kDouble) - reference).norm().item<double>();
  EXPECT_LE(difference, bound * reference.norm().item<double>()) << what;
}

template <class Type>
class ShardedClasses : public ::testing::Test {};
TYPED_TEST_SUITE(ShardedClasses, AllClasses, ClassNames);

TYPED_TEST(ShardedClasses, TrainAsTheClassAlone) {
  using Options = typename TypeParam::Options;
  for (const Storage& storage : storages()) {
    for (const bool clips : {false, true}) {
      SCOPED_TRACE(c10::str(storage.name, clips ? ", clipped" : ""));
      Options options = options_with<Options>(storage);
      if (clips) options.max_grad_norm(0.5);
      const auto alone = sharded_params(storage.dtype);
      typename TypeParam::Optimizer whole(alone, options);
      train_sharded(whole, alone);
      const auto expected = tensors_of(whole);
      run_on_ranks(2, [&](ProcessGroup& group) {
        const auto params = sharded_params(storage.dtype);
        ShardedOptimizer<typename TypeParam::Optimizer> sharded(params, options, group);
        train_sharded(sharded, params);
        const bool exactly = kElementwise<Options> && !clips;
        // The bits that a remainder adds to a bf16 number count from 2^-16 of it.
        const double bound = storage.remainders ? 1e-3 : 1e-6;
        for (std::size_t i = 0; i < params.size(); ++i) {
          expect_same(params[i], alone[i], exactly, bound, c10::str("parameter ", i));
        }
        const auto found = tensors_of(sharded);
        ASSERT_EQ(found.size(), expected.size());
        for (std::size_t i = 0; i < found.size(); ++i) {
          ASSERT_EQ(found[i].first, expected[i].first);
          expect_same(found[i].second, expected[i].second, exactly, bound, found[i].first);
        }
      });
    }
  }
}

}  // namespace
}  // namespace torchfuse::sharded_testing
