// SPDX-License-Identifier: BSD-3-Clause
// The update kernels with functors of one state, SGD and Adagrad, give the CPU driver's bits: for
// every dtype tuple, aligned or not, and where SGD has no momentum and so no state at all. What
// does not depend on the functor is tested with Adam, in test_fused_update.cpp.
#include <gtest/gtest.h>

#include "device.h"
#include "kernels/functors/adagrad.h"
#include "kernels/functors/sgd.h"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::testing {
namespace {

struct Tuple {
  DType param, grad, state;
  bool has_master;
};

std::vector<Tuple> tuples() {
  const DType f32 = DType::kFloat32;
  const DType f64 = DType::kFloat64;
  std::vector<Tuple> all{{f32, f32, f32, false}, {f64, f64, f64, false}};
  for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
    all.push_back({f32, half, f32, false});
    for (const DType grad : {half, f32}) {
      all.push_back({half, grad, f32, false});
      all.push_back({half, grad, f32, true});
      all.push_back({half, grad, half, false});
    }
  }
  return all;
}

/// One tensor of a list, on the host or copied to the device.
template <class Tensor>
struct Streams {
  Tensor param, grad, state, master;
};

using HostStreams = Streams<Buffer>;
using DeviceStreams = Streams<DeviceTensor>;

std::vector<HostStreams> contents(const Tuple& tuple) {
  std::mt19937 random(11);
  std::vector<HostStreams> list;
  for (const std::int64_t numel : {0, 1, 31, 33, 512, 513, 700, 5003}) {
    HostStreams streams{Buffer(tuple.param, numel), Buffer(tuple.grad, numel),
                        Buffer(tuple.state, numel), Buffer(DType::kFloat32, numel)};
    streams.param.fill_normal(random);
    streams.grad.fill_normal(random);
    streams.state.fill_abs_normal(random);
    streams.master.fill_normal(random);
    list.push_back(std::move(streams));
  }
  return list;
}

std::vector<DeviceStreams> on_device(const std::vector<HostStreams>& list, bool aligned) {
  std::vector<DeviceStreams> copies;
  for (const HostStreams& streams : list) {
    const auto at = static_cast<std::int64_t>(aligned ? 0 : copies.size());
    copies.push_back({DeviceTensor(streams.param, at), DeviceTensor(streams.grad, at + 1),
                      DeviceTensor(streams.state, at), DeviceTensor(streams.master, at)});
  }
  return copies;
}

/// Groups and steps in turn; a null state for groups that do not use it.
template <class Functor, class Tensor>
Rows rows_of(std::vector<Streams<Tensor>>& list,
             const std::vector<typename Functor::Params>& groups, bool has_master, float* steps) {
  Rows rows;
  for (std::size_t i = 0; i < list.size(); ++i) {
    TensorRow row;
    row.group = static_cast<std::int32_t>(i % groups.size());
    row.param = list[i].param.data();
    row.grad = list[i].grad.data();
    if (Functor::uses_state(groups[i % groups.size()], 0)) row.state[0] = list[i].state.data();
    row.master = has_master ? list[i].master.data() : nullptr;
    row.step = steps + i % 3;
    row.numel = list[i].param.numel();
    rows.add(row);
  }
  return rows;
}

template <class Functor>
UpdateArgs<Functor> args_of(const Rows& rows, const Tuple& tuple,
                            const std::vector<typename Functor::Params>& groups,
                            const StepScalars* scalars, bool write_back) {
  UpdateArgs<Functor> args;
  args.tensors = rows.table(tuple.param, tuple.grad, tuple.state, tuple.has_master);
  args.groups = groups.data();
  args.num_groups = static_cast<std::int32_t>(groups.size());
  args.scalars = scalars;
  args.write_back_grads = write_back;
  return args;
}

template <class Functor>
void expect_bits_of_the_cpu(const std::vector<typename Functor::Params>& groups) {
  std::uint64_t seed = 0;
  std::vector<float> steps{1.0f, 2.0f, 70.0f};
  const StepScalars scalars{0.375, 0.0f, 0.0f};
  const DeviceArray<float> device_steps(steps);
  const DeviceArray<StepScalars> device_scalars({scalars});
  for (const Tuple& tuple : tuples()) {
    for (const bool aligned : {true, false}) {
      SCOPED_TRACE("tuple " + std::to_string(seed) + (aligned ? "" : ", misaligned"));
      const bool write_back = seed % 2 == 1;
      std::vector<HostStreams> expected = contents(tuple);
      std::vector<DeviceStreams> actual = on_device(expected, aligned);
      const Rows host_rows = rows_of<Functor>(expected, groups, tuple.has_master, steps.data());
      const Rows rows = rows_of<Functor>(actual, groups, tuple.has_master, device_steps.data());
      fused_update_cpu(detect_cpu_isa(),
                       args_of<Functor>(host_rows, tuple, groups, &scalars, write_back), 0,
                       host_rows.offsets.back());
      set_order({.seed = ++seed, .flush_denormals = tuple.param != DType::kFloat64});
      const Status status = fused_update_cuda<Functor>(
          args_of<Functor>(rows, tuple, groups, device_scalars.data(), write_back), stream());
      ASSERT_TRUE(status.ok()) << status.error << " " << status.what;
      synchronize();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(actual[i].param.to_host() == expected[i].param) << "param of tensor " << i;
        EXPECT_TRUE(actual[i].grad.to_host() == expected[i].grad) << "grad of tensor " << i;
        EXPECT_TRUE(actual[i].state.to_host() == expected[i].state) << "state of tensor " << i;
        EXPECT_TRUE(actual[i].master.to_host() == expected[i].master) << "master of tensor " << i;
      }
    }
  }
}

std::vector<SgdParams> sgd_groups() {
  std::vector<SgdParams> groups(5);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr.value = 0.05 + 0.01 * static_cast<double>(i);
    groups[i].momentum.value = i == 0 ? 0.0 : 0.9;
    groups[i].dampening.value = i == 1 ? 0.25 : 0.0;
    groups[i].weight_decay.value = 0.1;
    groups[i].nesterov = i == 2;
    groups[i].wd_after_momentum = i == 3;
    groups[i].maximize = i == 4;
  }
  return groups;
}

TEST(CudaSgd, GivesTheBitsOfTheCpu) { expect_bits_of_the_cpu<Sgd>(sgd_groups()); }

TEST(CudaSgd, WithoutMomentumThereIsNoState) {
  expect_bits_of_the_cpu<Sgd>({sgd_groups().front()});
}

TEST(CudaSgd, ReadsItsMomentumFromTheDevice) {
  for (const float value : {0.0f, 0.5f}) {
    const DeviceArray<float> momentum({value});
    std::vector<SgdParams> by_pointer = sgd_groups();
    std::vector<SgdParams> by_value = sgd_groups();
    for (SgdParams& group : by_pointer) group.momentum.pointer = momentum.data();
    for (SgdParams& group : by_value) group.momentum.value = static_cast<double>(value);
    const Tuple fp32{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};
    std::vector<float> steps{1.0f, 2.0f, 70.0f};
    const DeviceArray<float> device_steps(steps);
    const StepScalars scalars{1.0, 0.0f, 0.0f};
    const DeviceArray<StepScalars> device_scalars({scalars});
    std::vector<HostStreams> expected = contents(fp32);
    std::vector<DeviceStreams> actual = on_device(expected, true);
    const Rows host_rows = rows_of<Sgd>(expected, by_value, false, steps.data());
    const Rows rows = rows_of<Sgd>(actual, by_pointer, false, device_steps.data());
    fused_update_cpu(detect_cpu_isa(), args_of<Sgd>(host_rows, fp32, by_value, &scalars, false), 0,
                     host_rows.offsets.back());
    set_order({.seed = 3});
    const Status status = fused_update_cuda<Sgd>(
        args_of<Sgd>(rows, fp32, by_pointer, device_scalars.data(), false), stream());
    ASSERT_TRUE(status.ok()) << status.error << " " << status.what;
    synchronize();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(actual[i].param.to_host() == expected[i].param) << "param of tensor " << i;
      EXPECT_TRUE(actual[i].state.to_host() == expected[i].state) << "state of tensor " << i;
    }
  }
}

TEST(CudaAdagrad, GivesTheBitsOfTheCpu) {
  std::vector<AdagradParams> groups(3);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr.value = 0.05;
    groups[i].lr_decay.value = 0.1 * static_cast<double>(i);
    groups[i].eps.value = 1e-10;
    groups[i].weight_decay.value = 0.1;
    groups[i].adagrad_w_mode = i == 1;
    groups[i].maximize = i == 2;
  }
  expect_bits_of_the_cpu<Adagrad>(groups);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
