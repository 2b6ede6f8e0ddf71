// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy on the device: values by the formula in fp64; every logit read once each way and
// every gradient written once; equal bits in every order of the threads.
#include <gtest/gtest.h>

#include "../cross_entropy_problem.h"
#include "device.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

struct InputsOnDevice {
  DeviceTensor logits, grad_losses;
  DeviceArray<std::int64_t> labels;
};
struct ResultsOnDevice {
  DeviceTensor losses, log_sum_exp, rest, grad_logits;
};

CrossEntropyResults run(const CrossEntropyCase& c, const CrossEntropyInputs& in,
                        std::int64_t offset) {
  CrossEntropyResults r(c);
  const InputsOnDevice inputs{DeviceTensor(in.logits, offset), DeviceTensor(in.grad_losses),
                              DeviceArray<std::int64_t>(in.labels)};
  const auto unwritten = [](const Buffer& host, std::int64_t at = 0) {
    return DeviceTensor::unwritten(host.dtype(), host.numel(), at);
  };
  ResultsOnDevice results{unwritten(r.losses), unwritten(r.log_sum_exp), unwritten(r.rest),
                          unwritten(r.grad_logits, offset)};
  expect_ok(softmax_cross_entropy_cuda(cross_entropy_args(c, inputs, results), kMultiprocessors,
                                       stream()));
  for (DeviceTensor* tensor : {&results.losses, &results.log_sum_exp, &results.rest}) {
    tensor->expect_accesses(0, 1);
  }
  inputs.logits.upload(in.logits.data());
  expect_ok(softmax_cross_entropy_backward_cuda(cross_entropy_backward_args(c, inputs, results),
                                                kMultiprocessors, stream()));
  inputs.logits.expect_accesses(1, 0);
  inputs.logits.expect_margins_intact();
  results.grad_logits.expect_accesses(0, 1);
  const auto download = [](const DeviceTensor& from, Buffer& to) {
    from.expect_margins_intact();
    from.download(to.data());
  };
  download(results.losses, r.losses);
  download(results.log_sum_exp, r.log_sum_exp);
  download(results.rest, r.rest);
  download(results.grad_logits, r.grad_logits);
  return r;
}

void expect_right_and_ordered(const CrossEntropyCase& c, const CrossEntropyInputs& in,
                              std::int64_t offset, decltype(expect_right)* expect = expect_right) {
  SCOPED_TRACE(name_of(c) + " offset " + std::to_string(offset));
  const bool flush = c.shape.logits != DType::kFloat64;
  set_order({0, 2, flush});
  const CrossEntropyResults first = run(c, in, offset);
  expect(c, in, first);
  set_order({5, 2, flush});
  EXPECT_TRUE(run(c, in, offset) == first);
  set_order({});
}

TEST(CudaSoftmaxCrossEntropy, SmallRowsOfAWarp) {
  for (const CrossEntropyCase& c : cross_entropy_cases({{19, 37}, {5, 64}, {3, 1}})) {
    expect_right_and_ordered(c, CrossEntropyInputs(c), 0);
    expect_right_and_ordered(c, CrossEntropyInputs(c), 1);
  }
}

TEST(CudaSoftmaxCrossEntropy, RowsOfABlock) {
  for (const CrossEntropyCase& c : cross_entropy_cases({{3, 1288}, {2, 9001}})) {
    expect_right_and_ordered(c, CrossEntropyInputs(c), 0);
    expect_right_and_ordered(c, CrossEntropyInputs(c), 3);
  }
}

TEST(CudaSoftmaxCrossEntropy, ErrorsDoNotGrowWithTheLogits) {
  set_order({});
  for (const auto& [c, center] : cases_of_large_logits()) {
    SCOPED_TRACE(name_of(c) + " around " + std::to_string(center));
    const CrossEntropyInputs in(c, 0, center);
    expect_right(c, in, run(c, in, 0));
  }
}

TEST(CudaSoftmaxCrossEntropy, ErrorsDoNotGrowWithTheLengthOfARow) {
  // The longest row of which no thread moves sums to fp64, the next one, and a long one.
  for (const std::int64_t classes : {15360, 15361, 1 << 18}) {
    const CrossEntropyCase c{{1, classes, DType::kFloat32}, 0.1};
    expect_right_and_ordered(c, logits_of_a_long_row(c), 0, expect_long_row_right);
  }
}

TEST(CudaSoftmaxCrossEntropy, LogitsThatGrowAlongARow) {
  for (const double smoothing : {0.0, 0.1}) {
    const CrossEntropyCase c{{1, 20000, DType::kFloat32}, smoothing};
    CrossEntropyInputs in(c);
    for (std::int64_t j = 0; j < c.shape.classes; ++j) {
      in.logits.set(j, 1000.0 + 0.001 * static_cast<double>(j));
    }
    set_order({});
    expect_right(c, in, run(c, in, 0));
  }
}

TEST(CudaSoftmaxCrossEntropy, InfinitelySmallLogitsOfAThreadAddNothing) {
  const CrossEntropyCase c{{2, 100, DType::kFloat32}};
  CrossEntropyInputs in(c);
  for (std::int64_t j = 0; j < 64; ++j) in.logits.set(j, -std::numeric_limits<double>::infinity());
  in.labels = {80, 3};
  set_order({});
  expect_right(c, in, run(c, in, 0));
}

TEST(CudaSoftmaxCrossEntropy, ALogitThatIsInfiniteOrNoNumberGivesNaN) {
  const CrossEntropyCase c{{1, 1503, DType::kFloat32}};
  set_order({});
  for (const double value : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    for (const std::int64_t place : {0, 2, 700, 1502}) {  // in the head, in vectors, behind them
      CrossEntropyInputs in(c);
      in.logits.set(place, value);
      in.labels = {5};
      const CrossEntropyResults r = run(c, in, 1);
      EXPECT_TRUE(std::isnan(r.losses.get(0))) << value << " in " << place;
      EXPECT_TRUE(std::isnan(r.grad_logits.get(5))) << value << " in " << place;
    }
  }
}

TEST(CudaSoftmaxCrossEntropy, LabelsOutsideOfTheClassesGiveNaN) {
  const CrossEntropyCase c{{3, 40, DType::kFloat32}};
  CrossEntropyInputs in(c);
  in.labels = {40, -1, 7};
  set_order({});
  const CrossEntropyResults r = run(c, in, 0);
  for (std::int64_t row = 0; row < 3; ++row) {
    EXPECT_EQ(std::isnan(r.losses.get(row)), row < 2);
    EXPECT_EQ(std::isnan(r.grad_logits.get(row * 40)), row < 2);
  }
}

TEST(CudaSoftmaxCrossEntropy, AnUnknownTypeIsAnError) {
  CrossEntropyArgs args;
  CrossEntropyBackwardArgs backward;
  args.shape = backward.shape = {1, 1, static_cast<DType>(9)};
  EXPECT_FALSE(softmax_cross_entropy_cuda(args, kMultiprocessors, stream()).ok());
  EXPECT_FALSE(softmax_cross_entropy_backward_cuda(backward, kMultiprocessors, stream()).ok());
}

}  // namespace
}  // namespace torchfuse::kernels
