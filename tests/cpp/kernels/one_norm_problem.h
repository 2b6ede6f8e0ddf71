// SPDX-License-Identifier: BSD-3-Clause
// NovoGrad and LARS on a list of tensors, for tests of their three phases: contents on the host,
// hyper-parameters, and the arguments of the phases.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kernels/functors/lars.h"
#include "kernels/functors/novograd.h"
#include "layerwise_problem.h"

namespace torchfuse::kernels::testing {

/// One tensor's operands, `Tensor` being a Buffer or its copy on a device. LARS tracks no norm.
template <class Tensor>
struct OneNormOperands {
  Tensor param, grad, state, master, ema, tracked;

  bool operator==(const OneNormOperands& other) const {
    return param == other.param && grad == other.grad && state == other.state &&
           master == other.master && ema == other.ema && tracked == other.tracked;
  }
};

inline std::vector<OneNormOperands<Buffer>> one_norm_contents(
    const LayerwiseTuple& tuple, const std::vector<std::int64_t>& sizes, std::int64_t offset = 0) {
  std::mt19937 random(7);
  const DType wide = tuple.param == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  std::vector<OneNormOperands<Buffer>> list;
  for (const std::int64_t numel : sizes) {
    OneNormOperands<Buffer> operands{
        Buffer(tuple.param, numel, offset), Buffer(tuple.grad, numel, offset),
        Buffer(tuple.state, numel, offset), Buffer(tuple.master(), numel, offset),
        Buffer(tuple.ema(), numel, offset), Buffer(wide, 1)};
    operands.grad.fill_normal(random);
    operands.master.fill_normal(random);
    operands.state.fill_normal(random);
    operands.ema.fill_normal(random);
    operands.tracked.set(0, 1.5);
    for (std::int64_t i = 0; i < numel; ++i) operands.param.set(i, operands.master.get(i));
    list.push_back(std::move(operands));
  }
  return list;
}

/// The bits of `mode`, below 16, are the flags.
inline NovoGradParams novograd(int mode) {
  NovoGradParams group;
  group.lr.value = 0.05;
  group.beta1.value = 0.9;
  group.beta2.value = 0.98;
  group.eps.value = 1e-8;
  group.weight_decay.value = 0.1;
  group.bias_correction = group.grad_averaging = (mode & 1) == 0;
  group.reg_inside_moment = (mode & 2) != 0;
  group.inf_norm = (mode & 4) != 0;
  group.init_zero = group.maximize = (mode & 8) != 0;
  return group;
}

/// The same below 4.
inline LarsParams lars(int mode) {
  LarsParams group;
  group.lr.value = 2.0;
  group.momentum.value = (mode & 1) != 0 ? 0.9 : 0.5;
  group.weight_decay.value = (mode & 2) != 0 ? 0.1 : 0.0;
  group.trust_coefficient.value = 0.01;
  group.eps.value = 1e-8;
  group.nesterov = (mode & 1) != 0;
  group.maximize = (mode & 2) != 0;
  return group;
}

/// Rows, their chunks, and the workspaces of the phases on the host.
template <class Functor, class Tensor>
struct OneNormProblem {
  using Params = typename Functor::Params;

  OneNormProblem(const LayerwiseTuple& tuple_, std::vector<OneNormOperands<Tensor>>& list,
                 float* step, const std::vector<Params>& groups_)
      : tuple(tuple_), groups(groups_) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      TensorRow row;
      row.group = static_cast<std::int32_t>(i % groups.size());
      row.param = list[i].param.data();
      row.grad = list[i].grad.data();
      row.state[0] = list[i].state.data();
      row.master = tuple.keeps_master() ? list[i].master.data() : nullptr;
      row.ema = tuple.has_ema ? list[i].ema.data() : nullptr;
      row.index = static_cast<std::int64_t>(i) << 33;
      row.tensor_state = list[i].tracked.data();
      row.step = step;
      row.numel = list[i].param.numel();
      rows.add(row);
      chunk_offsets.push_back(chunk_offsets.back() + num_norm_chunks(row.numel));
    }
    norms.resize(list.size() * Functor::kNumNorms);
    partials.resize(static_cast<std::size_t>(chunk_offsets.back()) * Functor::kNumNorms);
  }

  MeasureArgs<Functor> args(const StepScalars* scalars, MeasurePartial* partial_memory,
                            double* norm_memory) const {
    UpdateArgs<Functor> update;
    update.tensors = tuple.table(rows);
    update.groups = groups.data();
    update.num_groups = static_cast<std::int32_t>(groups.size());
    update.scalars = scalars;
    update.write_back_grads = write_back;
    update.norms = norm_memory;
    return {update, chunk_offsets.data(), partial_memory, norm_memory};
  }

  /// All phases on the CPU, the two over elements in ranges of at most `span`.
  void run_on_cpu(const StepScalars& scalars, CpuIsa isa = detect_cpu_isa(),
                  std::int64_t span = std::int64_t{1} << 40) {
    const MeasureArgs<Functor> all = args(&scalars, partials.data(), norms.data());
    const std::int64_t total = rows.offsets.back();
    for (std::int64_t begin = 0; begin < total; begin += span) {
      fused_measure_cpu<Functor>(isa, all, begin, std::min(begin + span, total));
    }
    tensor_norms<Functor>(all, 0, static_cast<std::int64_t>(rows.rows.size()));
    for (std::int64_t begin = 0; begin < total; begin += span) {
      fused_update_cpu<Functor>(isa, all.update, begin, std::min(begin + span, total));
    }
  }

  LayerwiseTuple tuple;
  std::vector<Params> groups;
  bool write_back = false;
  Rows rows;
  std::vector<std::int64_t> chunk_offsets{0};
  std::vector<MeasurePartial> partials;
  std::vector<double> norms;
};

}  // namespace torchfuse::kernels::testing
