// SPDX-License-Identifier: BSD-3-Clause
// LAMB on a list of tensors, for tests of the measure and norms phases: storage on the host, a
// plain fp64 loop for the norms, and the arguments of the phases.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernel_test.h"
#include "kernels/functors/lamb.h"
#include "kernels/layerwise_optimizer.h"
#include "kernels/multi_tensor_l2_norm.h"

namespace torchfuse::kernels::testing {

struct LayerwiseTuple {
  DType param, grad, state;
  bool has_master;
  std::optional<DType> second = {};  ///< of the second state, where it is another
  bool has_remainder = false;        ///< in the place of the master
  bool stochastic = false;           ///< parameters are rounded at random
  bool has_ema = false;              ///< averages of the parameters are moved too

  bool keeps_master() const { return has_master || has_remainder; }
  /// A remainder's 16 bits are taken for a bf16: any are a remainder.
  DType master() const { return has_remainder ? DType::kBFloat16 : DType::kFloat32; }

  DType ema() const { return param == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

  TensorTable table(const Rows& rows) const {
    TensorTable table = rows.table(param, grad, state, has_master);
    table.state[1] = second.value_or(state);
    table.has_remainder = has_remainder;
    table.stochastic = stochastic;
    table.seed = 0x123456789abcdef;
    table.has_ema = has_ema;
    table.ema = {0.999, 2.0, true};  // copies in the first step, and averages with a warm-up later
    return table;
  }
};

inline std::vector<LayerwiseTuple> layerwise_tuples() {
  const DType f32 = DType::kFloat32;
  const DType f64 = DType::kFloat64;
  std::vector<LayerwiseTuple> all{{f32, f32, f32, false}, {f64, f64, f64, false}};
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

/// Some that have no kernel of their own on CUDA.
inline std::vector<LayerwiseTuple> mixed_layerwise_tuples() {
  constexpr DType kFp32 = DType::kFloat32, kFp16 = DType::kFloat16, kBf16 = DType::kBFloat16;
  return {{kFp32, kFp32, kBf16, false},
          {kFp32, kFp16, kFp32, false, kBf16},
          {kBf16, kBf16, kBf16, true},
          {kFp16, kBf16, kFp16, true, kFp32},
          {kBf16, kBf16, kFp32, false, {}, true},
          {kBf16, kFp32, kBf16, false, kFp16, true},
          {kBf16, kBf16, kFp32, false, {}, false, true}};
}

/// With averages: three that have a kernel of their own then, and some that have none.
inline std::vector<LayerwiseTuple> ema_layerwise_tuples() {
  constexpr DType kFp32 = DType::kFloat32, kFp64 = DType::kFloat64, kBf16 = DType::kBFloat16;
  std::vector<LayerwiseTuple> tuples{{kFp32, kFp32, kFp32, false},
                                     {kFp64, kFp64, kFp64, false},
                                     {kBf16, kBf16, kFp32, true},
                                     {DType::kFloat16, kFp32, kFp32, false},
                                     mixed_layerwise_tuples()[5]};
  for (LayerwiseTuple& tuple : tuples) tuple.has_ema = true;
  return tuples;
}

inline std::vector<LambParams> lamb_groups() {
  std::vector<LambParams> groups(3);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr.value = 0.05;
    groups[i].beta1.value = 0.9;
    groups[i].beta2.value = 0.99;
    groups[i].eps.value = i == 2 ? 0.0 : 1e-6;  // 0 / 0 beyond the end must not be measured
    groups[i].weight_decay.value = i == 1 ? 0.0 : 0.1;
    groups[i].max_trust_ratio.value = 10.0;
    groups[i].adam_w_mode = i != 2;
    groups[i].grad_averaging = i != 1;
    groups[i].maximize = i == 1;
  }
  return groups;
}

/// The tensors' operands one by one, `Tensor` being a Buffer or its copy on a device.
template <class Tensor>
struct LambOperands {
  Tensor param, grad, exp_avg, exp_avg_sq, master, ema;
};

inline std::vector<LambOperands<Buffer>> lamb_contents(const LayerwiseTuple& tuple,
                                                       const std::vector<std::int64_t>& sizes,
                                                       std::int64_t offset = 0) {
  std::mt19937 random(5);
  std::vector<LambOperands<Buffer>> list;
  for (const std::int64_t numel : sizes) {
    LambOperands<Buffer> operands{Buffer(tuple.param, numel, offset),
                                  Buffer(tuple.grad, numel, offset),
                                  Buffer(tuple.state, numel, offset),
                                  Buffer(tuple.second.value_or(tuple.state), numel, offset),
                                  Buffer(tuple.master(), numel, offset),
                                  Buffer(tuple.ema(), numel, offset)};
    operands.param.fill_normal(random);
    operands.grad.fill_normal(random);
    operands.exp_avg.fill_normal(random, 0.1);
    operands.exp_avg_sq.fill_abs_normal(random, 0.1);
    operands.master.fill_normal(random);
    operands.ema.fill_normal(random);
    list.push_back(std::move(operands));
  }
  return list;
}

/// Rows, their chunks, and the workspaces of the phases on the host.
template <class Tensor>
struct LambProblem {
  LambProblem(const LayerwiseTuple& tuple_, std::vector<LambOperands<Tensor>>& list, float* steps,
              const std::vector<LambParams>& groups_, std::int64_t chunk_ = kNormChunk)
      : tuple(tuple_), groups(groups_), chunk(chunk_) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      TensorRow row;
      row.group = static_cast<std::int32_t>(i % groups.size());
      row.param = list[i].param.data();
      row.grad = list[i].grad.data();
      row.state[0] = list[i].exp_avg.data();
      row.state[1] = list[i].exp_avg_sq.data();
      row.master = tuple.keeps_master() ? list[i].master.data() : nullptr;
      row.ema = tuple.has_ema ? list[i].ema.data() : nullptr;
      row.index = static_cast<std::int64_t>(i) << 33;
      row.step = steps + i % 2;
      row.numel = list[i].param.numel();
      rows.add(row);
      chunk_offsets.push_back(chunk_offsets.back() + num_norm_chunks(row.numel, chunk));
    }
    norms.resize(list.size() * Lamb::kNumNorms);
    partials.resize(static_cast<std::size_t>(chunk_offsets.back()) * Lamb::kNumNorms);
  }

  MeasureArgs<Lamb> args(const StepScalars* scalars, MeasurePartial* partial_memory,
                         double* norm_memory) const {
    UpdateArgs<Lamb> update;
    update.tensors = tuple.table(rows);
    update.groups = groups.data();
    update.num_groups = static_cast<std::int32_t>(groups.size());
    update.scalars = scalars;
    update.write_back_grads = write_back;
    update.norms = norm_memory;
    return {update, chunk_offsets.data(), partial_memory, norm_memory, nullptr, chunk};
  }
  MeasureArgs<Lamb> args(const StepScalars* scalars) {
    return args(scalars, partials.data(), norms.data());
  }

  LayerwiseTuple tuple;
  std::vector<LambParams> groups;
  std::int64_t chunk;
  bool write_back = false;
  Rows rows;
  std::vector<std::int64_t> chunk_offsets{0};
  std::vector<MeasurePartial> partials;
  std::vector<double> norms;
};

}  // namespace torchfuse::kernels::testing
