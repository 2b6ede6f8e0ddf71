// SPDX-License-Identifier: BSD-3-Clause
// The kernels of every optimizer against the CPU's phases: elements with the same bits, norms up to
// the order of their sums, and the update behind them given the same norms. What does not depend on
// the functor is tested with Adam, in test_fused_update.cpp.
#include <gtest/gtest.h>

#include "device.h"
#include "kernels/optimizer_cases.h"
#include "kernels/optimizer_problem.h"

namespace torchfuse::kernels::testing {
namespace {

using DeviceList = std::vector<Operands<DeviceTensor>>;

constexpr StepScalars kHalf{0.5, 0.0f, 0.0f};
/// Of tensors in turn, and where their states begin.
const std::vector<float> kSteps{1.0f, 2.0f, 70.0f, 0.0f, 1.0f, 68.0f};

/// Every second gradient is misaligned; if not `aligned`, everything is.
DeviceList on_device(const TensorList& list, bool aligned) {
  DeviceList copies;
  for (const Operands<Buffer>& operands : list) {
    const auto number = static_cast<std::int64_t>(copies.size());
    const std::int64_t offset = aligned ? 0 : number + 1;
    Operands<DeviceTensor> copy{{}, DeviceTensor(operands.tracked)};
    for (int p = 0; p < kParts; ++p) {
      const std::int64_t more = p != kGrad ? 0 : aligned ? number % 2 : 1;
      copy.parts.emplace_back(operands.parts[static_cast<std::size_t>(p)], offset + more);
    }
    copies.push_back(std::move(copy));
  }
  return copies;
}

TensorList to_host(const DeviceList& list) {
  TensorList copies;
  for (const Operands<DeviceTensor>& operands : list) {
    Operands<Buffer> copy{{}, operands.tracked.to_host()};
    for (const DeviceTensor& part : operands.parts) {
      part.expect_margins_intact();
      copy.parts.push_back(part.to_host());
    }
    copies.push_back(std::move(copy));
  }
  return copies;
}

struct Options {
  bool aligned = true;
  std::uint64_t seed = 1;
  std::int64_t chunk = kNormChunk;
  double grad_coef = 0.5;
};

/// The norms that the device measures, which are near those of `host`, whose phases have run.
template <class Functor, class Device>
std::vector<double> measured_norms(const OptimizerProblem<Functor>& host, Device& device,
                                   const StepScalars* scalars) {
  const auto partials = DeviceArray<MeasurePartial>::unwritten(std::ssize(device.partials));
  const auto norms = DeviceArray<double>::unwritten(std::ssize(device.norms));
  expect_ok(fused_measure_cuda<Functor>(device.measure(scalars, partials.data(), norms.data()),
                                        stream()));
  const std::vector<double> found = norms.to_host();
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], host.norms[i], 1e-5 * host.norms[i]) << "norm " << i;
  }
  return found;
}

/// A step on both with `groups`, which the device may read from pointers.
template <class Functor>
void expect_bits_of_the_cpu(const UpdateTuple& tuple, const std::vector<std::int64_t>& sizes,
                            const Options& options,
                            const std::vector<typename Functor::Params>& groups,
                            const std::vector<typename Functor::Params>& device_groups) {
  SCOPED_TRACE(tuple.name() + ", seed " + std::to_string(options.seed) +
               (options.aligned ? "" : ", misaligned"));
  std::vector<float> steps = kSteps;
  const DeviceArray<float> device_steps(steps);
  const StepScalars scalars{options.grad_coef, 0.0f, 0.0f};
  const DeviceArray<StepScalars> device_scalars({scalars});
  TensorList expected = contents_of<Functor>(tuple, sizes);
  for (Operands<Buffer>& operands : expected) {
    Buffer& grad = operands.parts[kGrad];
    for (std::int64_t i = 0; i < grad.numel(); ++i) {
      grad.set(i, grad.get(i) * (0.5 / options.grad_coef));
    }
  }
  DeviceList actual = on_device(expected, options.aligned);
  OptimizerProblem<Functor> host(tuple, expected, groups, steps.data(), 3, steps.data() + 3);
  OptimizerProblem<Functor, DeviceTensor> device(tuple, actual, device_groups, device_steps.data(),
                                                 3, device_steps.data() + 3, options.chunk);
  host.write_back = device.write_back = options.seed % 2 == 1;
  device.from_the_end = options.seed % 4 < 2;
  host.run_on_cpu(scalars);

  set_order({.seed = options.seed, .flush_denormals = tuple.param != DType::kFloat64});
  std::vector<double> norms;
  if constexpr (Layerwise<Functor>) norms = measured_norms(host, device, device_scalars.data());
  ASSERT_FALSE(::testing::Test::HasFailure());
  const DeviceArray<double> same_norms(host.norms);
  expect_ok(fused_update_cuda<Functor>(device.update(device_scalars.data(), same_norms.data()),
                                       stream()));
  const TensorList found = to_host(actual);
  ASSERT_NO_FATAL_FAILURE(expect_same_parts(found, expected));
  for (std::size_t t = 0; t < found.size(); ++t) {
    const double tracked = found[t].tracked.get(0);
    const double exact = expected[t].tracked.get(0);
    ASSERT_NEAR(tracked, exact, 1e-5 * exact) << "norm that tensor " << t << " keeps";
    if constexpr (Layerwise<Functor>) {
      if (Functor::kTracksNorm && tuple.param == DType::kFloat64) {
        ASSERT_EQ(tracked, norms[t]);
      }
    }
  }
}

template <class Functor>
void expect_bits_of_the_cpu(const UpdateTuple& tuple, const std::vector<std::int64_t>& sizes,
                            const Options& options) {
  const auto groups = some_groups<Functor>();
  expect_bits_of_the_cpu<Functor>(tuple, sizes, options, groups, groups);
}

template <class Functor>
class CudaOptimizer : public ::testing::Test {};
using OthersThanAdam =
    ::testing::Types<Adagrad, Lamb, Lars, Lion, MuonMomentum, MuonUpdate, NovoGrad, Sgd>;
TYPED_TEST_SUITE(CudaOptimizer, OthersThanAdam, OptimizerName);

TYPED_TEST(CudaOptimizer, GivesTheBitsOfTheCpu) {
  std::uint64_t seed = 0;
  const std::vector<std::int64_t> few{0, 1, 7, 9, 31, 33, 512, 513, 5003, 16387};
  // Too many tensors for a short launch, most of them empty.
  std::vector<std::int64_t> many = few;
  many.resize(100);
  for (const UpdateTuple& tuple : update_tuples()) {
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_the_cpu<TypeParam>(tuple, few, {true, ++seed}));
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_the_cpu<TypeParam>(tuple, few, {false, ++seed}));
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_the_cpu<TypeParam>(tuple, many, {true, ++seed}));
  }
}

TYPED_TEST(CudaOptimizer, ATinyCoefficientGivesTheBitsOfTheCpu) {
  const DType f32 = DType::kFloat32;
  const DType bf16 = DType::kBFloat16;
  for (const UpdateTuple& tuple : {UpdateTuple{}, UpdateTuple{bf16, bf16, f32, true},
                                   UpdateTuple{f32, bf16, f32, false, bf16}}) {
    expect_bits_of_the_cpu<TypeParam>(tuple, {1, 33, 513, 5003, 16387},
                                      {.seed = 61, .grad_coef = 0x1.8p-127});
  }
}

TYPED_TEST(CudaOptimizer, ASkippedStepTouchesNothing) {
  std::vector<float> steps = kSteps;
  const DeviceArray<float> device_steps(steps);
  const DeviceArray<StepScalars> scalars({StepScalars{0.5, 0.0f, 1.0f}});
  const TensorList before = contents_of<TypeParam>({}, {5, 700});
  DeviceList list = on_device(before, true);
  OptimizerProblem<TypeParam, DeviceTensor> problem({}, list, some_groups<TypeParam>(),
                                                    device_steps.data(), 3);
  problem.write_back = true;
  set_order({.seed = 1});
  const DeviceArray<double> norms(problem.norms);
  if constexpr (Layerwise<TypeParam>) {
    const DeviceArray<MeasurePartial> partials(problem.partials);
    expect_ok(fused_measure_cuda<TypeParam>(
        problem.measure(scalars.data(), partials.data(), norms.data()), stream()));
  }
  expect_ok(fused_update_cuda<TypeParam>(problem.update(scalars.data(), norms.data()), stream()));
  EXPECT_EQ(norms.to_host(), problem.norms);
  expect_same_bits(to_host(list), before);
}

TEST(CudaSgd, WithoutMomentumThereIsNoState) {
  const std::vector<SgdParams> groups{OptimizerCase<Sgd>::group(0)};
  for (const UpdateTuple& tuple : update_tuples()) {
    expect_bits_of_the_cpu<Sgd>(tuple, {1, 33, 513, 5003}, {}, groups, groups);
  }
}

TEST(CudaSgd, ReadsItsMomentumFromTheDevice) {
  for (const float value : {0.0f, 0.5f}) {
    const DeviceArray<float> momentum({value});
    std::vector<SgdParams> by_value = some_groups<Sgd>();
    std::vector<SgdParams> by_pointer = by_value;
    for (SgdParams& group : by_pointer) group.momentum.pointer = momentum.data();
    for (SgdParams& group : by_value) group.momentum.value = static_cast<double>(value);
    expect_bits_of_the_cpu<Sgd>({}, {0, 1, 31, 33, 512, 513, 700, 5003}, {.seed = 3}, by_value,
                                by_pointer);
  }
}

template <class Functor>
class CudaLayerwise : public ::testing::Test {
 protected:
  using Problem = OptimizerProblem<Functor, DeviceTensor>;

  /// Runs body(problem, arguments, norms) on a list that is nowhere else.
  template <class Body>
  static void measure(const std::vector<std::int64_t>& sizes, bool aligned, std::uint64_t seed,
                      const Body& body) {
    const DeviceArray<float> steps(kSteps);
    const DeviceArray<StepScalars> scalars({kHalf});
    DeviceList list = on_device(contents_of<Functor>({}, sizes), aligned);
    Problem problem({}, list, some_groups<Functor>(), steps.data(), 3);
    const DeviceArray<MeasurePartial> partials(problem.partials);
    const DeviceArray<double> norms(problem.norms);
    set_order({.seed = seed});
    body(problem, problem.measure(scalars.data(), partials.data(), norms.data()), norms);
  }
};
TYPED_TEST_SUITE(CudaLayerwise, LayerwiseOptimizers, OptimizerName);

TYPED_TEST(CudaLayerwise, SmallerChunksMeasureTheSame) {
  for (const std::int64_t chunk : {2048, 8192}) {
    expect_bits_of_the_cpu<TypeParam>({}, {0, 512, 2048, 2049, 8192, 16387},
                                      {.aligned = false, .seed = 50, .chunk = chunk});
  }
}

TYPED_TEST(CudaLayerwise, SmallListsOfMoreTensorsThanALaunchHolds) {
  std::vector<std::int64_t> sizes(900, 3);
  sizes[450] = 700;
  expect_bits_of_the_cpu<TypeParam>({}, sizes, {.seed = 2});
}

TYPED_TEST(CudaLayerwise, NormsDoNotDependOnTheOrderOfBlocksOrOnAddresses) {
  std::vector<double> first;
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    TestFixture::measure({5, 700, 40001}, seed != 3, seed,
                         [&](const auto&, const MeasureArgs<TypeParam>& args, const auto& norms) {
                           expect_ok(fused_measure_cuda<TypeParam>(args, stream()));
                           if (first.empty()) first = norms.to_host();
                           EXPECT_EQ(norms.to_host(), first);
                         });
  }
}

// As for tensors that are split over processes: the phase stops at the sums, and goes on from them.
TYPED_TEST(CudaLayerwise, SumsAreThePartialsOfASecondNormsPhase) {
  const std::vector<std::int64_t> sizes{5, 0, 70000, 700};
  std::vector<double> expected;
  TestFixture::measure(sizes, true, 3, [&](const auto&, const auto& args, const auto& norms) {
    expect_ok(fused_measure_cuda<TypeParam>(args, stream()));
    expected = norms.to_host();
  });
  TestFixture::measure(sizes, true, 3, [&](const auto& problem, auto args, const auto& norms) {
    const DeviceArray<MeasurePartial> sums(std::vector<MeasurePartial>(problem.norms.size()));
    args.sums = sums.data();
    expect_ok(fused_measure_cuda<TypeParam>(args, stream()));
    EXPECT_EQ(norms.to_host(), problem.norms);
    const std::vector<std::int64_t> one_each{0, 1, 2, 3, 4};
    args.chunk_offsets = one_each.data();
    args.partials = args.sums;
    args.sums = nullptr;
    expect_ok(tensor_norms_cuda<TypeParam>(args, stream()));
    EXPECT_EQ(norms.to_host(), expected);
  });
}

TYPED_TEST(CudaLayerwise, Fp64BesideOtherTypesIsRefusedByName) {
  const UpdateTuple tuple{DType::kFloat64, DType::kFloat32, DType::kFloat64};
  float step = 1.0f;
  TensorList list = contents_of<TypeParam>(tuple, {5, 700});
  OptimizerProblem<TypeParam> problem(tuple, list, some_groups<TypeParam>(), &step);
  const auto args = problem.measure(&kHalf, problem.partials.data(), problem.norms.data());
  for (const Status& status : {fused_measure_cuda<TypeParam>(args, stream()),
                               fused_update_cuda<TypeParam>(args.update, stream())}) {
    EXPECT_NE(status.error, 0);
    EXPECT_NE(std::string(status.what).find("not built for this tuple"), std::string::npos)
        << status.what;
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
