// SPDX-License-Identifier: BSD-3-Clause
// A list of tensors, and a step of any optimizer on it: contents on the host, the arguments of the
// phases, and the phases on the CPU.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/functors/adagrad.h"
#include "kernels/layerwise_optimizer.h"
#include "kernels/multi_tensor_l2_norm.h"
#include "update_tuple.h"

namespace torchfuse::kernels::testing {

/// One tensor's operands, `Tensor` being a Buffer or its copy on a device.
template <class Tensor>
struct Operands {
  std::vector<Tensor> parts;  ///< by Part
  Tensor tracked;             ///< the number that some optimizers keep of a tensor
};
using TensorList = std::vector<Operands<Buffer>>;

/// The same contents for every alignment. Adagrad's state is a sum of squares.
template <class Functor>
TensorList contents_of(const UpdateTuple& tuple, const std::vector<std::int64_t>& sizes) {
  constexpr double kScale[kParts] = {1.0, 1.0, 0.1, 0.05, 0.05, 1.0, 1.0};
  std::mt19937 random(7);
  TensorList list;
  for (const std::int64_t numel : sizes) {
    Operands<Buffer> operands{{}, Buffer(tuple.dtype(kEma), 1)};
    for (int p = 0; p < kParts; ++p) {
      const Part part = static_cast<Part>(p);
      Buffer& buffer = operands.parts.emplace_back(tuple.dtype(part), numel);
      const bool square = part == kSecond || part == kMaximum ||
                          (part == kFirst && std::is_same_v<Functor, Adagrad>);
      if (square) {
        buffer.fill_abs_normal(random, kScale[part]);
      } else {
        buffer.fill_normal(random, kScale[part]);
      }
    }
    operands.tracked.set(0, 1.5);
    list.push_back(std::move(operands));
  }
  return list;
}

inline TensorList at_offset(const TensorList& list, std::int64_t offset) {
  TensorList moved = list;
  for (Operands<Buffer>& operands : moved) {
    for (Buffer& part : operands.parts) part = part.at_offset(offset);
  }
  return moved;
}

/// Wherever they lie.
inline bool same_bits(const Buffer& a, const Buffer& b) {
  const auto* bytes = static_cast<const char*>(a.data());
  return a.dtype() == b.dtype() && a.numel() == b.numel() &&
         std::equal(bytes, bytes + static_cast<std::size_t>(a.numel()) * size_of(a.dtype()),
                    static_cast<const char*>(b.data()));
}
inline void expect_same_parts(const TensorList& found, const TensorList& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t t = 0; t < found.size(); ++t) {
    for (int p = 0; p < kParts; ++p) {
      const auto part = static_cast<std::size_t>(p);
      ASSERT_TRUE(same_bits(found[t].parts[part], expected[t].parts[part]))
          << name_of(static_cast<Part>(p)) << " of tensor " << t;
    }
  }
}
inline void expect_same_bits(const TensorList& found, const TensorList& expected) {
  ASSERT_NO_FATAL_FAILURE(expect_same_parts(found, expected));
  for (std::size_t t = 0; t < found.size(); ++t) {
    ASSERT_TRUE(same_bits(found[t].tracked, expected[t].tracked)) << "norm of tensor " << t;
  }
}

/// All elements, for fused_update_cpu() in one range.
inline constexpr std::int64_t kWhole = std::int64_t{1} << 40;

/// Rows, their chunks, and the workspaces of the phases on the host. Tensors take groups and steps
/// in turn; operands that the group does not use are null.
template <class Functor, class Tensor = Buffer>
struct OptimizerProblem {
  using Params = typename Functor::Params;

  OptimizerProblem(const UpdateTuple& tuple_, std::vector<Operands<Tensor>>& list,
                   const std::vector<Params>& groups_, float* steps, std::size_t num_steps = 1,
                   const float* starts = nullptr, std::int64_t chunk_ = kNormChunk)
      : tuple(tuple_), groups(groups_), chunk(chunk_), types(tuple_.table()) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      TensorRow row;
      row.group = static_cast<std::int32_t>(i % groups.size());
      for (int p = 0; p < kParts; ++p) {
        const Part part = static_cast<Part>(p);
        if (uses(part, groups[i % groups.size()])) {
          pointer_of(row, part) = list[i].parts[static_cast<std::size_t>(p)].data();
        }
      }
      row.index = static_cast<std::int64_t>(i) << 33;
      row.tensor_state = list[i].tracked.data();
      row.step = steps + i % num_steps;
      if (starts != nullptr && i % 4 != 0) row.start = starts + i % num_steps;
      row.numel = list[i].parts[kParam].numel();
      rows.add(row);
      chunk_offsets.push_back(chunk_offsets.back() + num_norm_chunks(row.numel, chunk));
    }
    if constexpr (Layerwise<Functor>) {
      norms.resize(list.size() * Functor::kNumNorms);
      partials.resize(static_cast<std::size_t>(chunk_offsets.back()) * Functor::kNumNorms);
    }
  }

  bool uses(Part part, const Params& group) const {
    if (part == kMaster) return tuple.keeps_master();
    if (part == kEma) return tuple.has_ema;
    const int state = part - kFirst;
    return state < 0 || (state < Functor::kNumStates && Functor::uses_state(group, state));
  }

  UpdateArgs<Functor> update(const StepScalars* scalars,
                             const double* norm_memory = nullptr) const {
    UpdateArgs<Functor> args;
    args.tensors = types;
    args.tensors.rows = rows.rows.data();
    args.tensors.offsets = rows.offsets.data();
    args.tensors.count = static_cast<std::int64_t>(rows.rows.size());
    args.groups = groups.data();
    args.num_groups = static_cast<std::int32_t>(groups.size());
    args.scalars = scalars;
    args.write_back_grads = write_back;
    args.from_the_end = from_the_end;
    args.norms = norm_memory;
    return args;
  }

  MeasureArgs<Functor> measure(const StepScalars* scalars, MeasurePartial* partial_memory,
                               double* norm_memory) const {
    return {update(scalars, norm_memory),
            chunk_offsets.data(),
            partial_memory,
            norm_memory,
            nullptr,
            chunk};
  }

  /// All phases, those over elements in ranges of at most `span`.
  void run_on_cpu(const StepScalars& scalars, CpuIsa isa = detect_cpu_isa(),
                  std::int64_t span = kWhole) {
    const std::int64_t total = rows.offsets.back();
    if constexpr (Layerwise<Functor>) {
      const MeasureArgs<Functor> args = measure(&scalars, partials.data(), norms.data());
      for (std::int64_t begin = 0; begin < total; begin += span) {
        fused_measure_cpu<Functor>(isa, args, begin, std::min(begin + span, total));
      }
      tensor_norms<Functor>(args, 0, static_cast<std::int64_t>(rows.rows.size()));
    }
    const UpdateArgs<Functor> args = update(&scalars, norms.data());
    for (std::int64_t begin = 0; begin < total; begin += span) {
      fused_update_cpu<Functor>(isa, args, begin, std::min(begin + span, total));
    }
  }

  UpdateTuple tuple;
  std::vector<Params> groups;
  std::int64_t chunk;
  TensorTable types;  ///< without rows
  bool write_back = false;
  bool from_the_end = false;
  Rows rows;
  std::vector<std::int64_t> chunk_offsets{0};
  std::vector<MeasurePartial> partials;
  std::vector<double> norms;
};

}  // namespace torchfuse::kernels::testing
