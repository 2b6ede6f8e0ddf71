// SPDX-License-Identifier: BSD-3-Clause
#include "ops/fused_step/muon.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "kernels/functors/adam.h"
#include "ops/fused_step/algorithm.h"
#include "ops/fused_step/newton_schulz.h"

namespace torchfuse::ops {

namespace {

/// Elements of the matrices in one product: a few megabytes on the CPU, whose caches keep the
/// matrices between the products, and more on a CUDA device.
constexpr std::int64_t kElementsAtATime = 1 << 20;
constexpr std::int64_t kElementsAtATimeOnCuda = 1 << 26;
/// Elements whose memory does not matter.
constexpr std::int64_t kFewElements = 1 << 16;

std::int64_t product(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

std::size_t leading_dims(c10::IntArrayRef sizes, const kernels::MuonParams& group) {
  const auto dims = static_cast<std::size_t>(group.matrix_dims.value);
  return dims == 0 ? 0 : sizes.size() - dims;
}

/// How a parameter's elements form matrices. The first of a matrix's dimensions counts the rows,
/// and the others together count the columns. Columns may be in any order, because a permutation
/// of columns commutes with orthogonalization, and so does a transposition.
struct Matrices {
  Matrices(const TensorLayout& layout, const kernels::MuonParams& group) {
    const std::size_t first = leading_dims(layout.sizes, group);
    count = product(layout.sizes.slice(0, first));
    rows = layout.sizes[first];
    columns = product(layout.sizes.slice(first + 1));
    bool apart = true;  // whether no two matrices are interleaved
    for (std::size_t d = 0; d < first; ++d) {
      apart = apart && (layout.sizes[d] == 1 || layout.strides[d] >= rows * columns);
    }
    const bool by_rows = rows == 1 || columns == 1 || layout.strides[first] == columns;
    transposed = apart && !by_rows && layout.strides[first] == 1;
    in_place = apart && (by_rows || transposed);
  }

  bool operator==(const Matrices&) const = default;

  std::int64_t count;
  std::int64_t rows;
  std::int64_t columns;
  bool transposed;  ///< the memory holds the transposed matrices
  bool in_place;    ///< matrices are consecutive in memory, each by rows or by columns
};

NewtonSchulz settings_of(const kernels::MuonParams& group) {
  const int steps = static_cast<int>(group.ns_steps.value);
  NewtonSchulz settings =
      group.polar_express ? polar_express(steps, group.eps.value)
                          : equal_iterations({group.ns_a.value, group.ns_b.value, group.ns_c.value},
                                             steps, group.eps.value);
  settings.batched = group.ns_batched;
  return settings;
}

/// Returns the dtype of the products. bf16 pays only where the hardware multiplies in bf16.
at::ScalarType dtype_of_products(const Bucket& bucket, const kernels::MuonParams& group) {
  if (bucket.key.param == kernels::DType::kFloat64) return at::kDouble;
  if (group.ns_float32) return at::kFloat;
  const bool fast = bucket.key.device.is_cuda() || kernels::multiplies_bf16(current_cpu_isa());
  return group.ns_bfloat16 || fast ? at::kBFloat16 : at::kFloat;
}

kernels::DType kernel_type(at::ScalarType dtype) {
  if (dtype == at::kDouble) return kernels::DType::kFloat64;
  return dtype == at::kFloat ? kernels::DType::kFloat32 : kernels::DType::kBFloat16;
}

/// Matrices of one shape and one dtype of products, which are orthogonalized together.
struct Batch {
  Matrices like;
  NewtonSchulz settings;
  at::ScalarType dtype;
  std::vector<std::size_t> rows;  ///< indices into the bucket's rows
  std::int64_t count = 0;         ///< number of matrices
  std::int64_t stack = 0;         ///< matrices in the last row
};

bool equal(const TensorLayout& a, const TensorLayout& b) {
  return a.sizes == b.sizes && a.strides == b.strides;
}

/// Sorts matrices into batches. `rows` are indices into the bucket's rows.
std::vector<Batch> batches_of(const Bucket& bucket, const std::vector<std::size_t>& rows,
                              const std::vector<kernels::MuonParams>& groups) {
  std::vector<NewtonSchulz> settings;
  for (const kernels::MuonParams& group : groups) settings.push_back(settings_of(group));
  std::vector<Batch> batches;
  std::size_t batch = 0;  // of the row before, which mostly has the same shape
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t row = rows[i];
    const auto group = static_cast<std::size_t>(bucket.rows[row].group);
    const bool as_before = i > 0 && bucket.rows[row].group == bucket.rows[rows[i - 1]].group &&
                           equal(bucket.layouts[row], bucket.layouts[rows[i - 1]]);
    if (!as_before) {
      Matrices like(bucket.layouts[row], groups[group]);
      const std::int64_t count = std::exchange(like.count, 1);
      const at::ScalarType dtype = dtype_of_products(bucket, groups[group]);
      const auto found = std::find_if(batches.begin(), batches.end(), [&](const Batch& other) {
        return other.like == like && other.dtype == dtype && other.settings == settings[group];
      });
      batch = static_cast<std::size_t>(found - batches.begin());
      if (found == batches.end()) batches.push_back({like, settings[group], dtype, {}, 0});
      batches[batch].stack = count;
    }
    batches[batch].rows.push_back(row);
    batches[batch].count += batches[batch].stack;
  }
  return batches;
}

/// Memory for the directions of a batch.
class Directions {
 public:
  Directions(const Bucket& bucket, const Batch& batch) : batch_(batch) {
    const Matrices& like = batch.like;
    const auto options = at::TensorOptions().dtype(batch.dtype).device(bucket.key.device);
    matrices_ = like.transposed ? at::empty({batch.count, like.columns, like.rows}, options)
                                : at::empty({batch.count, like.rows, like.columns}, options);
    for (const std::size_t row : batch.rows) {
      const TensorLayout& layout = bucket.layouts[row];
      places_.push_back(places_.back() + product(layout.sizes));
      if (!like.in_place) {
        copies_.push_back(at::empty_strided(layout.sizes, layout.strides, options));
      }
    }
  }

  /// Returns the memory of the rows' directions, in the order of the parameters' memory.
  std::vector<void*> memory() const {
    std::vector<void*> all;
    all.reserve(places_.size());
    char* const begin = static_cast<char*>(matrices_.mutable_data_ptr());
    const auto itemsize = static_cast<std::int64_t>(matrices_.itemsize());
    for (std::size_t i = 0; i + 1 < places_.size(); ++i) {
      all.push_back(copies_.empty() ? begin + places_[i] * itemsize
                                    : copies_[i].mutable_data_ptr());
    }
    return all;
  }

  /// Returns the same memory as a flat tensor.
  at::Tensor flat(std::size_t i) const {
    if (!copies_.empty()) return copies_[i].as_strided({copies_[i].numel()}, {1});
    return matrices_.view(-1).slice(0, places_[i], places_[i + 1]);
  }

  void orthogonalize() const {
    for (std::size_t i = 0; i < copies_.size(); ++i) by_rows(i).copy_(copies_[i]);
    newton_schulz_(matrices_, batch_.settings, at_a_time());
    for (std::size_t i = 0; i < copies_.size(); ++i) copies_[i].copy_(by_rows(i));
  }

 private:
  /// Returns how many matrices take part in a product. Products of a few matrices need less memory
  /// than the batch itself.
  std::int64_t at_a_time() const {
    if (!batch_.settings.batched) return 1;
    const std::int64_t matrix = batch_.like.rows * batch_.like.columns;
    const std::int64_t most = matrices_.is_cuda() ? kElementsAtATimeOnCuda : kElementsAtATime;
    const std::int64_t by_memory = std::max(batch_.count / 3, kFewElements / matrix);
    return std::max<std::int64_t>(1, std::min(most / matrix, by_memory));
  }

  at::Tensor by_rows(std::size_t i) const {
    return matrices_.view(-1).slice(0, places_[i], places_[i + 1]).view(copies_[i].sizes());
  }

  const Batch& batch_;
  at::Tensor matrices_;
  std::vector<std::int64_t> places_{0};  ///< where each row's direction begins
  std::vector<at::Tensor> copies_;       ///< one per row, unless the matrices are in place
};

/// Rows of matrices in a launch, and where their directions are.
struct MatrixRows {
  MatrixRows(const Bucket& bucket, const std::vector<std::size_t>& rows, at::ScalarType type)
      : indices(rows), dtype(type) {
    offsets.reserve(rows.size() + 1);
    directions.reserve(rows.size());
    for (const std::size_t row : rows) {
      offsets.push_back(offsets.back() + bucket.rows[row].numel);
    }
  }

  const std::vector<std::size_t>& indices;  ///< of the bucket's rows
  std::vector<std::int64_t> offsets{0};
  std::vector<void*> directions;
  at::ScalarType dtype;  ///< of the directions
};

/// One step's arguments, and the launches over rows of matrices.
struct MuonStep {
  const char* op;
  const Bucket& bucket;
  const std::vector<kernels::MuonParams>& groups;
  const kernels::StepScalars* scalars;
  bool write_back_grads;

  template <class Functor>
  kernels::UpdateArgs<Functor> args_of(const std::vector<kernels::TensorRow>& rows,
                                       const std::vector<std::int64_t>& offsets,
                                       const std::vector<typename Functor::Params>& params) const {
    kernels::UpdateArgs<Functor> args;
    args.tensors = bucket.table();
    args.tensors.device = nullptr;  // the bucket's kept rows are others
    args.tensors.rows = rows.data();
    args.tensors.offsets = offsets.data();
    args.tensors.count = static_cast<std::int64_t>(rows.size());
    args.groups = params.data();
    args.num_groups = static_cast<std::int32_t>(params.size());
    args.scalars = scalars;
    return args;
  }

  /// Updates the momentum and writes the directions.
  void update_momentum(const MatrixRows& all) const {
    std::vector<kernels::TensorRow> rows;
    rows.reserve(all.indices.size());
    for (std::size_t i = 0; i < all.indices.size(); ++i) {
      kernels::TensorRow& row = rows.emplace_back(bucket.rows[all.indices[i]]);
      row.param = all.directions[i];
      row.master = row.ema = nullptr;
      row.state[0] = std::exchange(row.state[kernels::Muon::kMomentum], nullptr);
    }
    auto args = args_of<kernels::MuonMomentum>(rows, all.offsets, groups);
    kernels::TensorTable& table = args.tensors;
    table.param = kernel_type(all.dtype);
    std::fill(std::begin(table.state), std::end(table.state),
              table.state[kernels::Muon::kMomentum]);
    table.has_master = table.has_remainder = table.has_ema = table.stochastic = false;
    args.write_back_grads = write_back_grads;
    update_elements(op, bucket.key.device, args);
  }

  /// Updates the parameters along the directions. Rows of one group and shape share an entry of
  /// hyper-parameters.
  void update_params(const MatrixRows& all) const {
    std::vector<kernels::MuonUpdateParams> params;
    std::vector<std::size_t> firsts;  // the first row of each entry
    std::vector<kernels::TensorRow> rows;
    rows.reserve(all.indices.size());
    std::size_t entry = 0;  // of the row before
    for (std::size_t i = 0; i < all.indices.size(); ++i) {
      const std::size_t index = all.indices[i];
      const auto shares = [&](std::size_t first) {
        return bucket.rows[first].group == bucket.rows[index].group &&
               bucket.layouts[first].sizes == bucket.layouts[index].sizes;
      };
      if (i == 0 || !shares(firsts[entry])) {
        entry = static_cast<std::size_t>(std::find_if(firsts.begin(), firsts.end(), shares) -
                                         firsts.begin());
      }
      if (entry == firsts.size()) {
        firsts.push_back(index);
        params.push_back(update_params_of(index));
      }
      kernels::TensorRow& row = rows.emplace_back(bucket.rows[index]);
      row.group = static_cast<std::int32_t>(entry);
      std::fill(std::begin(row.state), std::end(row.state), nullptr);
      row.state[0] = all.directions[i];
    }
    auto args = args_of<kernels::MuonUpdate>(rows, all.offsets, params);
    std::fill(std::begin(args.tensors.state), std::end(args.tensors.state), kernel_type(all.dtype));
    update_elements(op, bucket.key.device, args);
  }

  kernels::MuonUpdateParams update_params_of(std::size_t index) const {
    const kernels::MuonParams& group = groups[bucket.rows[index].group];
    const Matrices shape(bucket.layouts[index], group);
    const double factor = kernels::Muon::lr_factor(group, static_cast<double>(shape.rows),
                                                   static_cast<double>(shape.columns));
    return {group.lr, group.weight_decay, factor};
  }

  /// Runs Adam's pass over the rows whose groups have no `use_muon`.
  void update_others() const {
    std::vector<kernels::TensorRow> rows;
    std::vector<std::int64_t> offsets{0};
    for (const kernels::TensorRow& row : bucket.rows) {
      if (groups[row.group].use_muon) continue;
      rows.push_back(row);
      offsets.push_back(offsets.back() + row.numel);
    }
    if (rows.empty()) return;
    std::vector<kernels::AdamParams> params(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      params[g].lr = groups[g].lr;
      params[g].beta1 = groups[g].beta1;
      params[g].beta2 = groups[g].beta2;
      params[g].eps = groups[g].eps;
      params[g].weight_decay = groups[g].weight_decay;
    }
    auto args = args_of<kernels::Adam>(rows, offsets, params);
    if (rows.size() == bucket.rows.size()) args.tensors.device = bucket.kept.for_update();
    args.tensors.state[2] = args.tensors.state[0];  // of the momentum, which these rows lack
    args.write_back_grads = write_back_grads;
    update_elements(op, bucket.key.device, args);
  }

  void update_batch(const Batch& batch) const {
    const Directions directions(bucket, batch);
    MatrixRows rows(bucket, batch.rows, batch.dtype);
    rows.directions = directions.memory();
    update_momentum(rows);
    directions.orthogonalize();
    update_params(rows);
  }

  /// Updates sharded matrices, all with one dtype of products. See Note [Sharded matrices].
  void update_shards(const std::vector<std::size_t>& indices, at::ScalarType dtype,
                     const MatrixExchange& exchange) const {
    const auto options = at::TensorOptions().dtype(dtype).device(bucket.key.device);
    const at::Tensor shards = at::empty({exchange.numel()}, options);
    MatrixRows rows(bucket, indices, dtype);
    const auto address = [](const at::Tensor& tensor, std::int64_t element) -> void* {
      return static_cast<char*>(tensor.mutable_data_ptr()) +
             element * static_cast<std::int64_t>(tensor.itemsize());
    };
    for (std::size_t i = 0; i < indices.size(); ++i) {
      rows.directions.push_back(address(shards, exchange.place_in_sent(i)));
    }
    update_momentum(rows);
    const at::Tensor results = orthogonalized(shards, indices, exchange);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      rows.directions[i] = address(results, exchange.place_in_received(i));
    }
    update_params(rows);
  }

  /// Gathers the matrices that this rank owns, orthogonalizes them, and returns this rank's shards
  /// of all matrices.
  at::Tensor orthogonalized(const at::Tensor& shards, const std::vector<std::size_t>& indices,
                            const MatrixExchange& exchange) const {
    std::vector<std::size_t> owned;
    for (const std::size_t matrix : exchange.owned()) owned.push_back(indices[matrix]);
    const std::vector<Batch> batches = batches_of(bucket, owned, groups);
    std::vector<Directions> directions;
    directions.reserve(batches.size());
    std::vector<at::Tensor> whole(owned.size());
    for (const Batch& batch : batches) {
      const Directions& own = directions.emplace_back(bucket, batch);
      for (std::size_t i = 0; i < batch.rows.size(); ++i) {
        const auto place = std::find(owned.begin(), owned.end(), batch.rows[i]) - owned.begin();
        whole[static_cast<std::size_t>(place)] = own.flat(i);
      }
    }
    exchange.gather(shards, whole);
    for (const Directions& own : directions) own.orthogonalize();
    return exchange.scatter(whole, shards.options());
  }
};

/// Returns the rows of matrices.
std::vector<std::size_t> matrices_in(const Bucket& bucket,
                                     const std::vector<kernels::MuonParams>& groups) {
  std::vector<std::size_t> rows;
  for (std::size_t row = 0; row < bucket.rows.size(); ++row) {
    if (groups[bucket.rows[row].group].use_muon) rows.push_back(row);
  }
  return rows;
}

/// Calls visit(rows, dtype) with the rows of matrices of each dtype of products.
template <class Visit>
void by_dtype(const Bucket& bucket, const std::vector<kernels::MuonParams>& groups, Visit visit) {
  const std::vector<std::size_t> rows = matrices_in(bucket, groups);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    std::vector<std::size_t> alike;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(alike), [&](std::size_t row) {
      return dtype_of_products(bucket, groups[bucket.rows[row].group]) == dtype;
    });
    if (!alike.empty()) visit(alike, dtype);
  }
}

}  // namespace

void check_muon_param(const Argument& argument, c10::IntArrayRef sizes,
                      const kernels::MuonParams& group) {
  if (!group.use_muon) return;
  const auto dims = static_cast<std::size_t>(group.matrix_dims.value);
  const std::size_t least = std::max<std::size_t>(dims, 2);
  if (sizes.size() < least || dims == 1) {
    fail(argument,
         dims == 1 ? "be in a group whose matrix_dims is 0 or at least 2"
                   : "have at least " + std::to_string(least) + " dimensions with use_muon",
         dims == 1 ? "1" : "the shape " + c10::str(sizes),
         "Put it in a group with use_muon=False, which AdamW updates.");
  }
  if (product(sizes) == 0) {
    fail(argument, "have no dimension of size 0 with use_muon", "the shape " + c10::str(sizes),
         "Put it in a group with use_muon=False.");
  }
}

void plan_muon_exchanges(const char* caller, const Bucket& bucket,
                         const std::vector<kernels::MuonParams>& groups,
                         MatrixExchanges& exchanges) {
  if (bucket.shard_groups == nullptr) return;
  by_dtype(bucket, groups, [&](const std::vector<std::size_t>& rows, at::ScalarType dtype) {
    std::vector<ShardedMatrix> matrices;
    matrices.reserve(rows.size());
    for (const std::size_t index : rows) {
      const kernels::TensorRow& row = bucket.rows[index];
      const Matrices shape(bucket.layouts[index], groups[row.group]);
      matrices.push_back({bucket.layouts[index].index,
                          bucket.layouts[index].name_checksum,
                          static_cast<std::int64_t>(bucket.key.param),
                          static_cast<std::int64_t>(kernel_type(dtype)),
                          shape.count,
                          shape.rows,
                          shape.columns,
                          static_cast<std::int64_t>(groups[row.group].ns_steps.value),
                          {row.numbers.first, row.numbers.run, row.numbers.stride, row.numel}});
    }
    try {
      exchanges.of(caller, bucket, dtype).plan(matrices, bucket.key.device);
    } catch (...) {
      exchanges.clear();  // all ranks have to plan again, whatever was planned before
      throw;
    }
  });
}

void update_muon(const char* op, const Bucket& bucket,
                 const std::vector<kernels::MuonParams>& groups,
                 const kernels::StepScalars* scalars, bool write_back_grads,
                 MatrixExchanges& exchanges) {
  // On the CPU, a skipped step need not multiply. Ranks that exchange matrices stay together.
  const bool alone = bucket.shard_groups == nullptr;
  if (alone && bucket.key.device.is_cpu() && scalars->skip != 0.0f) return;
  const MuonStep step{op, bucket, groups, scalars, write_back_grads};
  step.update_others();
  if (alone) {
    const std::vector<Batch> batches = batches_of(bucket, matrices_in(bucket, groups), groups);
    for (const Batch& batch : batches) step.update_batch(batch);
    return;
  }
  by_dtype(bucket, groups, [&](const std::vector<std::size_t>& rows, at::ScalarType dtype) {
    step.update_shards(rows, dtype, exchanges.of(op, bucket, dtype));
  });
}

}  // namespace torchfuse::ops
