// SPDX-License-Identifier: BSD-3-Clause
// The update kernels with functors of one state against the CPU driver: for every dtype tuple,
// aligned or not. What does not depend on the functor is tested with Adam, in
// test_fused_update.cpp.
#pragma once

#include <gtest/gtest.h>

#include "device.h"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::testing {

struct OneStateTuple {
  DType param, grad, state;
  bool has_master;
  bool has_ema = false;

  DType ema() const { return param == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
};

inline std::vector<OneStateTuple> one_state_tuples() {
  const DType f32 = DType::kFloat32;
  const DType f64 = DType::kFloat64;
  std::vector<OneStateTuple> all{{f32, f32, f32, false}, {f64, f64, f64, false}};
  for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
    all.push_back({f32, half, f32, false});
    for (const DType grad : {half, f32}) {
      all.push_back({half, grad, f32, false});
      all.push_back({half, grad, f32, true});
      all.push_back({half, grad, half, false});
    }
  }
  // With averages: three that have a kernel of their own then, and one that has none.
  const DType bf16 = DType::kBFloat16;
  all.push_back({f32, f32, f32, false, true});
  all.push_back({f64, f64, f64, false, true});
  all.push_back({bf16, bf16, f32, true, true});
  all.push_back({DType::kFloat16, f32, f32, false, true});
  return all;
}

/// One tensor of a list, on the host or copied to the device.
template <class Tensor>
struct OneStateOperands {
  Tensor param, grad, state, master, ema;
};

inline std::vector<OneStateOperands<Buffer>> one_state_contents(const OneStateTuple& tuple) {
  std::mt19937 random(11);
  std::vector<OneStateOperands<Buffer>> list;
  for (const std::int64_t numel : {0, 1, 31, 33, 512, 513, 700, 5003}) {
    OneStateOperands<Buffer> operands{Buffer(tuple.param, numel), Buffer(tuple.grad, numel),
                                      Buffer(tuple.state, numel), Buffer(DType::kFloat32, numel),
                                      Buffer(tuple.ema(), numel)};
    operands.param.fill_normal(random);
    operands.grad.fill_normal(random);
    operands.state.fill_abs_normal(random);
    operands.master.fill_normal(random);
    operands.ema.fill_normal(random);
    list.push_back(std::move(operands));
  }
  return list;
}

inline std::vector<OneStateOperands<DeviceTensor>> on_device(
    const std::vector<OneStateOperands<Buffer>>& list, bool aligned) {
  std::vector<OneStateOperands<DeviceTensor>> copies;
  for (const OneStateOperands<Buffer>& operands : list) {
    const auto at = static_cast<std::int64_t>(aligned ? 0 : copies.size());
    copies.push_back({DeviceTensor(operands.param, at), DeviceTensor(operands.grad, at + 1),
                      DeviceTensor(operands.state, at), DeviceTensor(operands.master, at),
                      DeviceTensor(operands.ema, at)});
  }
  return copies;
}

/// Groups and steps in turn, some of which begin late; a null state for groups that do not use it.
template <class Functor, class Tensor>
Rows rows_of(std::vector<OneStateOperands<Tensor>>& list,
             const std::vector<typename Functor::Params>& groups, const OneStateTuple& tuple,
             float* steps) {
  Rows rows;
  for (std::size_t i = 0; i < list.size(); ++i) {
    TensorRow row;
    row.group = static_cast<std::int32_t>(i % groups.size());
    row.param = list[i].param.data();
    row.grad = list[i].grad.data();
    if (Functor::uses_state(groups[i % groups.size()], 0)) row.state[0] = list[i].state.data();
    row.master = tuple.has_master ? list[i].master.data() : nullptr;
    row.ema = tuple.has_ema ? list[i].ema.data() : nullptr;
    row.step = steps + i % 3;
    if (i % 4 != 0) row.start = steps + 3 + i % 3;
    row.numel = list[i].param.numel();
    rows.add(row);
  }
  return rows;
}

template <class Functor>
UpdateArgs<Functor> args_of(const Rows& rows, const OneStateTuple& tuple,
                            const std::vector<typename Functor::Params>& groups,
                            const StepScalars* scalars, bool write_back) {
  UpdateArgs<Functor> args;
  args.tensors = rows.table(tuple.param, tuple.grad, tuple.state, tuple.has_master);
  args.tensors.has_ema = tuple.has_ema;
  args.tensors.ema = {0.999, 2.0, true};  // copies, warms up or averages, by the tensor's step
  args.groups = groups.data();
  args.num_groups = static_cast<std::int32_t>(groups.size());
  args.scalars = scalars;
  args.write_back_grads = write_back;
  return args;
}

/// `groups` on the CPU, and the same on the device, where numbers may be read from pointers.
template <class Functor>
void expect_one_state_bits_of_the_cpu(const OneStateTuple& tuple,
                                      const std::vector<typename Functor::Params>& groups,
                                      const std::vector<typename Functor::Params>& device_groups,
                                      bool aligned, std::uint64_t seed) {
  std::vector<float> steps{1.0f, 2.0f, 70.0f, 0.0f, 1.0f, 68.0f};  // and where they begin
  const StepScalars scalars{0.375, 0.0f, 0.0f};
  const DeviceArray<float> device_steps(steps);
  const DeviceArray<StepScalars> device_scalars({scalars});
  const bool write_back = seed % 2 == 0;
  std::vector<OneStateOperands<Buffer>> expected = one_state_contents(tuple);
  std::vector<OneStateOperands<DeviceTensor>> actual = on_device(expected, aligned);
  const Rows host_rows = rows_of<Functor>(expected, groups, tuple, steps.data());
  const Rows rows = rows_of<Functor>(actual, device_groups, tuple, device_steps.data());
  fused_update_cpu(detect_cpu_isa(),
                   args_of<Functor>(host_rows, tuple, groups, &scalars, write_back), 0,
                   host_rows.offsets.back());
  set_order({.seed = seed, .flush_denormals = tuple.param != DType::kFloat64});
  const Status status = fused_update_cuda<Functor>(
      args_of<Functor>(rows, tuple, device_groups, device_scalars.data(), write_back), stream());
  ASSERT_TRUE(status.ok()) << status.error << " " << status.what;
  synchronize();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(actual[i].param.to_host() == expected[i].param) << "param of tensor " << i;
    EXPECT_TRUE(actual[i].grad.to_host() == expected[i].grad) << "grad of tensor " << i;
    EXPECT_TRUE(actual[i].state.to_host() == expected[i].state) << "state of tensor " << i;
    EXPECT_TRUE(actual[i].master.to_host() == expected[i].master) << "master of tensor " << i;
    EXPECT_TRUE(actual[i].ema.to_host() == expected[i].ema) << "average of tensor " << i;
  }
}

template <class Functor>
void expect_one_state_bits_of_the_cpu(const std::vector<typename Functor::Params>& groups) {
  std::uint64_t seed = 0;
  for (const OneStateTuple& tuple : one_state_tuples()) {
    for (const bool aligned : {true, false}) {
      SCOPED_TRACE("seed " + std::to_string(++seed) + (aligned ? "" : ", misaligned"));
      expect_one_state_bits_of_the_cpu<Functor>(tuple, groups, groups, aligned, seed);
    }
  }
}

}  // namespace torchfuse::kernels::testing
