// SPDX-License-Identifier: BSD-3-Clause
// Brings the shards of matrices together, each matrix on one rank, and returns the results.
//
// Note [Sharded matrices]
// A matrix cannot be orthogonalized by parts. If it is sharded over ranks, one of them, its owner,
// receives all shards, orthogonalizes the matrix and returns every rank's part. All matrices of a
// bucket travel together: one all-to-all towards the owners and one back, each with the bytes of
// this rank's shards. The owners' work is balanced by the cost of the products. Every rank computes
// the same owners from the same sizes. Where a shard has copies on several ranks (a mesh with
// replicas), one of them sends it, and all of them receive the result.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ops/bucket.h"

namespace torchfuse::ops {

/// Numbers of a shard's elements in the whole matrix.
struct MatrixShard {
  std::int64_t first;
  std::int64_t run;
  std::int64_t stride;
  std::int64_t numel;
  bool operator==(const MatrixShard&) const = default;
};

/// A parameter that consists of matrices, of which this rank has a shard. Ranks send this to each
/// other. Everything but the shard must be equal on all ranks. Names are compared if both are
/// known.
struct ShardedMatrix {
  std::int64_t index;          ///< the parameter's number
  std::int64_t name_checksum;  ///< 0: unknown
  std::int64_t dtype;          ///< the parameter's kernels::DType
  std::int64_t products;       ///< kernels::DType of the products
  std::int64_t count;          ///< number of matrices, each with `rows` and `columns`
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t iterations;
  MatrixShard shard;

  bool operator==(const ShardedMatrix&) const = default;
  /// Compares everything but name and shard.
  bool same_matrix(ShardedMatrix other) const;
  bool may_have_name_of(const ShardedMatrix& other) const;
  std::string text() const;
  /// Returns the number of multiplications.
  double cost() const;
};

class MatrixExchange {
 public:
  /// `group` names a process group that all ranks with shards belong to.
  MatrixExchange(std::string group, std::string caller)
      : group_(std::move(group)), caller_(std::move(caller)) {}

  const std::string& group() const { return group_; }

  /// Chooses owners, and learns the other ranks' shards if the matrices are not those of the last
  /// call, which all ranks must notice together. Two collectives then, after which the host waits
  /// for the device. Throws on all ranks if they do not list the same matrices in the same order.
  /// Ranks notice another order of matrices with one shape by the parameters' names only.
  void plan(const std::vector<ShardedMatrix>& matrices, const c10::Device& device);

  /// Returns the indices of the matrices that this rank owns.
  const std::vector<std::size_t>& owned() const { return owned_; }
  /// Number of elements of this rank's shards.
  std::int64_t numel() const { return numel_; }
  /// Returns where a matrix's shard begins in the tensor that gather() sends.
  std::int64_t place_in_sent(std::size_t matrix) const { return sent_places_[matrix]; }
  /// Returns where a matrix's shard begins in the tensor that scatter() returns.
  std::int64_t place_in_received(std::size_t matrix) const { return received_places_[matrix]; }

  /// Sends the shards, numel() elements, to the owners. `whole` are the owned matrices, flat in
  /// memory order, in which the other ranks' shards are stored. A collective.
  void gather(const at::Tensor& shards, const std::vector<at::Tensor>& whole) const;
  /// Returns numel() elements with these options: this rank's shards of all matrices, given the
  /// owned ones. A collective.
  at::Tensor scatter(const std::vector<at::Tensor>& whole, const at::TensorOptions& options) const;

 private:
  /// A shard of an owned matrix that a rank sends or receives.
  struct Piece {
    std::size_t owned;  ///< index into owned()
    MatrixShard shard;
  };

  void choose_owners(const std::vector<ShardedMatrix>& matrices);
  void learn_shards(const std::vector<ShardedMatrix>& matrices, const c10::Device& device);
  at::Tensor gathered(const at::Tensor& own, const c10::Device& device) const;
  [[noreturn]] void fail_order(const std::string& first, const std::string& other,
                               std::size_t rank) const;
  bool sends(std::size_t rank, std::size_t matrix) const;
  void lay_out();
  at::Tensor exchange(const at::Tensor& sent, const std::vector<std::int64_t>& sent_counts,
                      const std::vector<std::int64_t>& received_counts) const;

  std::string group_;
  std::string caller_;
  std::vector<ShardedMatrix> matrices_;  ///< of the last plan; empty: none
  std::size_t rank_ = 0;
  std::size_t size_ = 0;
  std::vector<std::size_t> owners_;               ///< by matrix
  std::vector<std::vector<MatrixShard>> shards_;  ///< by rank and matrix
  std::vector<std::size_t> owned_;
  std::int64_t numel_ = 0;
  std::vector<std::int64_t> sent_places_;
  std::vector<std::int64_t> received_places_;
  std::vector<std::int64_t> to_owners_;    ///< elements of this rank's shards, by owner
  std::vector<std::int64_t> from_ranks_;   ///< elements of owned matrices, by sender
  std::vector<std::int64_t> to_ranks_;     ///< elements of owned matrices, by receiver
  std::vector<std::int64_t> from_owners_;  ///< elements of this rank's shards, by owner
  std::vector<Piece> gathered_;            ///< in the order in which they arrive
  std::vector<Piece> scattered_;           ///< in the order in which they are sent
};

/// The exchanges of an optimizer's sharded matrices, kept between steps.
class MatrixExchanges {
 public:
  /// Returns the exchange of a bucket's matrices with products in `dtype`.
  MatrixExchange& of(const char* caller, const Bucket& bucket, at::ScalarType dtype);
  /// Forgets all plans.
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    BucketKey key;
    at::ScalarType dtype;
    MatrixExchange exchange;
  };
  std::vector<Entry> entries_;
};

}  // namespace torchfuse::ops
