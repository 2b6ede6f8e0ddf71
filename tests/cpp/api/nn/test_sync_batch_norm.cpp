// SPDX-License-Identifier: BSD-3-Clause
// torchfuse::nn::SyncBatchNorm: torch::nn::BatchNorm alone, and the pooled batch in a group. The
// other rank of the group is a backend that puts its own sums into each exchange.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/batch_norm.h>
#include <torchfuse/nn/sync_batch_norm.h>
#include <torchfuse/parallel/convert_sync_batch_norm.h>

#include <sstream>
#include <string>
#include <vector>

#include "../expect_error.h"
#include "../fake_group.h"

namespace torchfuse::testing {
namespace {

using nn::SyncBatchNorm;
using nn::SyncBatchNormOptions;

void expect_within(const at::Tensor& actual, const at::Tensor& expected, double tolerance = 1e-5) {
  ASSERT_TRUE(actual.defined() && expected.defined());
  EXPECT_TRUE(torch::allclose(actual, expected, tolerance, tolerance))
      << (actual - expected).abs().max();
}

/// Adds what `others` say, in turn, to each all-reduce; its own values are those of rank 0.
class OtherRank : public FakeBackend {
 public:
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    EXPECT_EQ(options.reduceOp, c10d::ReduceOp::SUM);
    EXPECT_EQ(tensors.at(0).scalar_type(), at::kDouble);
    tensors[0].add_(others.at(exchanges++));
    return work();
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& all, at::Tensor& own,
                                                 const c10d::AllgatherOptions&) override {
    all.view({2, -1})[0].copy_(own);
    all.view({2, -1})[1].copy_(own + difference);
    ++gathers;
    return work();
  }

  std::vector<at::Tensor> others;
  std::size_t exchanges = 0;
  int gathers = 0;
  std::int64_t difference = 0;  ///< of what the rank says about itself
};

class SyncBatchNormGroup : public ::testing::Test {
 protected:
  static constexpr const char* kName = "torchfuse_test_sync_batch_norm";
  c10::intrusive_ptr<OtherRank> other_ = c10::make_intrusive<OtherRank>();
  RegisteredGroup group_{other_, kName};
};

class SyncBatchNormBackends : public SyncBatchNormGroup,
                              public ::testing::WithParamInterface<bool> {};

TEST(SyncBatchNorm, IsBatchNormAlone) {
  torch::manual_seed(0);
  SyncBatchNorm ours(6);
  torch::nn::BatchNorm2d theirs(6);
  for (int batch = 0; batch < 3; ++batch) {
    const at::Tensor x = torch::randn({4, 6, 5, 7});
    const at::Tensor a = x.clone().requires_grad_();
    const at::Tensor b = x.clone().requires_grad_();
    const at::Tensor y = ours(a);
    const at::Tensor z = theirs(b);
    expect_within(y, z);
    const at::Tensor grad = torch::randn_like(y);
    y.backward(grad);
    z.backward(grad);
    expect_within(a.grad(), b.grad());
  }
  expect_within(ours->weight.grad(), theirs->weight.grad());
  expect_within(ours->bias.grad(), theirs->bias.grad());
  expect_within(ours->running_mean, theirs->running_mean);
  expect_within(ours->running_var, theirs->running_var);
  EXPECT_EQ(ours->num_batches_tracked.item<std::int64_t>(), 3);
  ours->eval();
  theirs->eval();
  const at::Tensor x = torch::randn({4, 6, 5, 7});
  expect_within(ours(x), theirs(x));
}

TEST(SyncBatchNorm, FusesResidualAndRelu) {
  SyncBatchNorm fused(SyncBatchNormOptions(3).fuse_relu(true));
  SyncBatchNorm plain(3);
  const at::Tensor x = torch::randn({4, 3, 5, 5}).to(at::kBFloat16);
  const at::Tensor residual = torch::randn({4, 3, 5, 5}).to(at::kBFloat16);
  const at::Tensor expected = (plain(x).to(at::kFloat) + residual.to(at::kFloat)).relu();
  expect_within(fused(x, residual).to(at::kFloat), expected, 2e-2);
}

TEST(SyncBatchNorm, WorksInASequential) {
  torch::nn::Sequential model(torch::nn::Linear(4, 3), SyncBatchNorm(3));
  EXPECT_EQ(model->forward(torch::randn({5, 4})).sizes(), (std::vector<std::int64_t>{5, 3}));
  EXPECT_EQ(c10::str(*model->ptr<nn::SyncBatchNormImpl>(1)),
            "torchfuse::nn::SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=true, "
            "track_running_stats=true, fuse_relu=false)");
}

TEST(SyncBatchNorm, StateMovesToAndFromBatchNorm) {
  torch::nn::BatchNorm2d theirs(3);
  theirs(torch::randn({4, 3, 2, 2}));
  SyncBatchNorm ours(3);
  std::stringstream stream;
  torch::save(theirs, stream);
  torch::load(ours, stream);
  expect_within(ours->running_mean, theirs->running_mean);
  EXPECT_EQ(ours->num_batches_tracked.item<std::int64_t>(), 1);
}

TEST(SyncBatchNorm, ClonesAreIndependent) {
  SyncBatchNorm layer(SyncBatchNormOptions(3).momentum(std::nullopt));
  const auto copy = std::dynamic_pointer_cast<nn::SyncBatchNormImpl>(layer->clone());
  layer(torch::randn({4, 3}));
  EXPECT_EQ(copy->num_batches_tracked.item<std::int64_t>(), 0);
  copy->forward(torch::randn({4, 3}));
  EXPECT_EQ(copy->num_batches_tracked.item<std::int64_t>(), 1);
}

TEST(SyncBatchNorm, WithoutParametersOrStatistics) {
  SyncBatchNorm layer(SyncBatchNormOptions(3).affine(false).track_running_stats(false));
  EXPECT_TRUE(layer->parameters().empty());
  EXPECT_TRUE(layer->buffers().empty());
  const at::Tensor x = torch::randn({6, 3});
  expect_within(layer->forward(x), torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false));
  layer->eval();
  expect_within(layer->forward(x), torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false));
}

TEST(SyncBatchNorm, RefusesBadInput) {
  SyncBatchNorm layer(3);
  EXPECT_EQ(error_of([&] { layer(torch::randn({3})); }),
            "SyncBatchNorm(3): expected at least 2D input (got 1D input)");
  EXPECT_EQ(error_of([&] { layer(torch::randn({2, 4})); }),
            "SyncBatchNorm(3): expected input to have num_features = 3 channels in dimension 1, "
            "got 4.");
  EXPECT_EQ(error_of([&] { layer(torch::randn({1, 3})); }),
            "SyncBatchNorm(3): expected more than 1 value per channel when training, got input "
            "size [1, 3]");
  EXPECT_EQ(error_of([&] { layer(torch::ones({2, 3}, at::kInt)); }),
            "SyncBatchNorm(3): expected input to be of dtype float32, float16, bfloat16 or "
            "float64, got Int.");
  EXPECT_EQ(error_of([] { SyncBatchNorm(0); }),
            "SyncBatchNorm: expected num_features to be positive, got 0.");
  EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 0);
}

TEST(SyncBatchNorm, NamesAGroupThatIsNotThere) {
  SyncBatchNorm layer(SyncBatchNormOptions(3).process_group("nobody"));
  EXPECT_EQ(error_of([&] { layer(torch::randn({2, 3})); })
                .find("SyncBatchNorm(3): expected group to name a process group that exists, got "
                      "'nobody'."),
            0U);
  layer->eval();
  layer(torch::randn({2, 3}));
}

TEST_P(SyncBatchNormBackends, IsBatchNormOnThePooledBatch) {
  other_->gives_work = GetParam();
  torch::manual_seed(1);
  const at::Tensor own = torch::randn({3, 4, 5}) * 3;
  const at::Tensor others = torch::randn({6, 4, 5}) - 2;
  const at::Tensor own_grad = torch::randn_like(own);
  const at::Tensor others_grad = torch::randn_like(others);

  const at::Tensor pooled = torch::cat({own, others}).requires_grad_();
  torch::nn::BatchNorm1d reference(4);
  const at::Tensor expected = reference(pooled);
  expected.backward(torch::cat({own_grad, others_grad}));

  SyncBatchNorm layer(4);
  EXPECT_EQ(parallel::convert_sync_batch_norm(*layer, kName), 1);
  const at::Tensor others_packed = batch_norm_stats(others);
  const auto [unused, saved] = batch_norm_elemt(
      others, {}, {}, batch_norm_stats(own) + others_packed, {}, {}, {}, {}, 0.1, 1e-5);
  const auto others_sums =
      std::get<0>(batch_norm_backward_reduce(others_grad, others, saved, {}, {}, {}));
  other_->others = {others_packed, others_sums};
  const at::Tensor x = own.clone().requires_grad_();
  const at::Tensor y = layer(x);
  y.backward(own_grad);
  expect_within(y, expected.narrow(0, 0, 3));
  expect_within(x.grad(), pooled.grad().narrow(0, 0, 3));
  expect_within(layer->running_mean, reference->running_mean);
  expect_within(layer->running_var, reference->running_var);
  EXPECT_EQ(other_->exchanges, 2U) << "one each way";
  EXPECT_EQ(other_->gathers, 1) << "the ranks agree once";
  layer->eval();
  layer(x);
  EXPECT_EQ(other_->exchanges, 2U);
}

INSTANTIATE_TEST_SUITE_P(Works, SyncBatchNormBackends, ::testing::Bool(), [](const auto& info) {
  return info.param ? "OneForEachExchange" : "None";
});

TEST_F(SyncBatchNormGroup, RanksThatDifferAreNamed) {
  other_->difference = 1;
  torch::nn::Sequential model(torch::nn::Linear(4, 3), SyncBatchNorm(3));
  EXPECT_EQ(parallel::convert_sync_batch_norm(*model, kName), 1);
  EXPECT_EQ(error_of([&] { model->forward(torch::randn({5, 4})); }),
            "SyncBatchNorm '1'(3): expected num_features to be the same in all ranks of the group "
            "'torchfuse_test_sync_batch_norm', got 3, 4. Build the same model in every process.");
}

TEST_F(SyncBatchNormGroup, ConversionWarnsOfOtherLayersAndIsUndone) {
  torch::nn::Sequential model(torch::nn::BatchNorm1d(3), SyncBatchNorm(3));
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(parallel::convert_sync_batch_norm(*model, kName), 1);
  const std::string warned = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(warned.find("layer '0' is torch::nn::BatchNorm1dImpl"), std::string::npos) << warned;
  EXPECT_EQ(parallel::convert_sync_batch_norm(*model, ""), 1);
  model->forward(torch::randn({5, 3}));
  EXPECT_EQ(other_->exchanges, 0U);
}

}  // namespace
}  // namespace torchfuse::testing
