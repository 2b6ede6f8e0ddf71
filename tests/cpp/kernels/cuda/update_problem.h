// SPDX-License-Identifier: BSD-3-Clause
// A list of tensors that is updated by the device and by the CPU driver, whose bits are the
// device's, too.
#pragma once

#include <numeric>

#include "kernels/cuda/alignment.h"
#include "kernels/fused_optimizer.h"
#include "rows_on_device.h"
#include "update_data.h"

namespace torchfuse::kernels::testing {

/// Load and store instructions.
struct Traffic {
  std::size_t loads = 0;
  std::size_t stores = 0;
  std::size_t prefetches = 0;
};

/// Elements per chunk of a list of `total`: at least one vector for each of 256 threads, and 4,096
/// chunks where there are so many. See Note [CUDA chunks].
inline std::int64_t chunk_of(std::int64_t total, std::int64_t vec) {
  std::int64_t chunk = 256 * vec;
  while (chunk < 16384 && total / (2 * chunk) >= 4096) chunk *= 2;
  return chunk;
}

/// Loads, or stores, of one of a tensor's operands: vectors in accesses of the width that the
/// operand's address allows behind the head, the other elements one by one. See Note [Peeling].
inline std::size_t instructions_of(const cuda::OperandAccess& operand,
                                   const std::vector<cuda::OperandAccess>& all, std::int64_t numel,
                                   std::int64_t chunk, std::int64_t vec) {
  const std::int64_t head =
      cuda::best_peeling(all.data(), static_cast<int>(all.size()), static_cast<std::uint32_t>(vec))
          .head;
  const std::int64_t size = operand.element_size;
  const std::int64_t width =
      std::gcd(static_cast<std::int64_t>(operand.address) + head * size, std::int64_t{16});
  std::int64_t instructions = 0;
  for (std::int64_t begin = 0; begin < numel; begin += chunk) {
    const std::int64_t count = std::min(chunk, numel - begin);
    const std::int64_t vectors = std::max<std::int64_t>(count - head, 0) / vec;
    instructions += vectors * (vec * size / width) + (count - vectors * vec);
  }
  return static_cast<std::size_t>(instructions);
}

class UpdateProblem {
 public:
  using Guard = DeviceMemory::Guard;

  bool write_back_grads = false;
  bool from_the_end = false;
  bool rows_on_device = false;  ///< see Note [Device tables]
  StepScalars scalars{0.375, 0.0f, 0.0f};
  /// The length of the list as far as the choice of a chunk is concerned, if it is larger.
  std::int64_t claimed_total = 0;

  UpdateProblem(const UpdateTuple& tuple, std::vector<UpdateTensor> tensors,
                const UpdateGroups& groups)
      : tuple_(tuple), tensors_(std::move(tensors)), groups_(groups), steps_(steps_of(tensors_)) {
    for (const UpdateTensor& tensor : tensors_) offsets_.push_back(offsets_.back() + tensor.numel);
    before_ = first_contents(tuple, tensors_);
    rows_.resize(tensors_.size());
  }

  /// kScattered: each part in an order of its own, so that no head mends nearly all. kAlike: in one
  /// order and equally misaligned, so that heads do, but for a third state that not all tensors
  /// have. kInOrder: the same from an aligned address on.
  enum class Packing { kScattered, kAlike, kInOrder };

  /// One memory for each part, in which its tensors lie without gaps: an access outside of one
  /// falls into another.
  void pack(std::uint32_t seed, Packing packing = Packing::kScattered) {
    std::mt19937 random(seed);
    const std::size_t misalignment = packing == Packing::kInOrder ? 0 : random() % 8;
    clear();
    for (int p = 0; p < kParts; ++p) {
      const Part part = static_cast<Part>(p);
      std::vector<std::size_t> used, spare;
      for (std::size_t t = 0; t < tensors_.size(); ++t) {
        if (uses(part, t)) used.push_back(t);
        if (has_spare(part, t)) spare.push_back(t);
      }
      const Guard guard = random() % 2 == 0 ? Guard::kBegin : Guard::kEnd;
      if (packing == Packing::kScattered) std::shuffle(used.begin(), used.end(), random);
      place(part, used, packing == Packing::kScattered ? random() % 8 : misalignment, guard);
      place(part, spare, 0, guard);
    }
  }

  /// A memory of its own for each part of each tensor, misalignment(part, tensor) elements behind a
  /// 16-byte boundary.
  template <class Misalignment>
  void set_apart(Misalignment misalignment) {
    clear();
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      for (int p = 0; p < kParts; ++p) {
        const Part part = static_cast<Part>(p);
        if (!uses(part, t) && !has_spare(part, t)) continue;
        const bool even = (t + static_cast<std::size_t>(p)) % 2 == 0;
        place(part, {t}, static_cast<std::size_t>(misalignment(part, t)),
              even ? Guard::kBegin : Guard::kEnd);
      }
    }
  }

  /// Load and store instructions on a part in the last launch, and addresses prefetched.
  Traffic traffic(Part part) const {
    Traffic sum;
    for (const Place& place : places_) {
      if (place.part != part) continue;
      sum.loads += place.memory.loads();
      sum.stores += place.memory.stores();
      sum.prefetches += place.memory.prefetches();
    }
    return sum;
  }

  /// Sets everything to its first contents and enqueues the update.
  Status launch(Order order) {
    order.flush_denormals = tuple_.param != DType::kFloat64;
    set_order(order);
    for (const Place& place : places_) {
      std::vector<char> bytes(place.memory.bytes());
      std::size_t at = 0;
      for (const std::size_t t : place.tensors) {
        std::memcpy(bytes.data() + at, begin_of(before_[place.part], t), bytes_of(place.part, t));
        at += bytes_of(place.part, t);
      }
      place.memory.upload(bytes.data());
    }
    const DeviceArray<StepScalars> device_scalars({scalars});
    std::vector<std::int64_t> offsets = offsets_;
    offsets.back() = total();
    UpdateArgs<Adam> arguments = args(rows_, offsets, groups_.on_device(), device_scalars.data());
    const RowsOnDevice kept(arguments.tensors, offsets.data(), update_chunk(total()));
    if (rows_on_device) arguments.tensors.device = kept.get();
    const Status status = fused_update_cuda<Adam>(arguments, stream());
    synchronize();
    const auto now = device_scalars.to_host();
    EXPECT_EQ(std::memcmp(&now[0], &scalars, sizeof scalars), 0) << "the scalars were changed";
    return status;
  }

  /// Updates on the device and on the CPU, and fails the test unless the bits are the same, each
  /// byte was accessed as often as it should be, and by as few instructions.
  void run(const Order& order) {
    SCOPED_TRACE(tuple_.name() + ", seed " + std::to_string(order.seed) + ", " +
                 std::to_string(order.resident_blocks) + " resident blocks");
    const Status status = launch(order);
    ASSERT_TRUE(status.ok()) << status.error << " " << status.what;
    Contents expected = before_;
    update_by_cpu(expected);
    expect(expected, scalars.skip == 0.0f);
  }

  /// Fails the test if anything was accessed.
  void expect_untouched() { expect(before_, false); }

 private:
  /// One memory of the device and the tensors that lie in it.
  struct Place {
    Part part;
    std::vector<std::size_t> tensors;
    bool used;
    DeviceMemory memory;
  };

  std::int64_t total() const { return std::max(claimed_total, offsets_.back()); }

  bool uses(Part part, std::size_t tensor) const {
    if (part == kMaster) return tuple_.has_master || tuple_.has_remainder;
    if (part == kEma) return tuple_.has_ema;
    return part != kMaximum ||
           groups_.on_host()[static_cast<std::size_t>(tensors_[tensor].group)].amsgrad;
  }

  /// Of the states that are not used, half are null and half are memory that must stay untouched.
  bool has_spare(Part part, std::size_t tensor) const {
    return part == kMaximum && tensor % 2 == 0 && !uses(part, tensor);
  }

  /// Without pointers to tensors. Whole parameters, parts of one run, and of short ones take turns.
  TensorRow row_of(std::size_t t, float* step) const {
    constexpr ElementNumbers kNumbers[] = {{}, {77, 0, 0}, {5, 3, 11}};
    return {.step = step,
            .numel = tensors_[t].numel,
            .group = tensors_[t].group,
            .index = (std::int64_t{1} << 33) + tensors_[t].seed,
            .numbers = kNumbers[t % 3]};
  }

  std::size_t bytes_of(Part part, std::size_t tensor) const {
    return static_cast<std::size_t>(tensors_[tensor].numel) * size_of(tuple_.dtype(part));
  }

  char* begin_of(Buffer& buffer, std::size_t tensor) const {
    return static_cast<char*>(buffer.data()) +
           static_cast<std::size_t>(offsets_[tensor]) * size_of(buffer.dtype());
  }

  void clear() {
    places_.clear();
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      rows_[t] = row_of(t, steps_.data() + t);
    }
  }

  void place(Part part, const std::vector<std::size_t>& tensors, std::size_t misalignment,
             Guard guard) {
    std::size_t bytes = 0;
    for (const std::size_t t : tensors) bytes += bytes_of(part, t);
    if (bytes == 0) return;
    const std::size_t size = size_of(tuple_.dtype(part));
    DeviceMemory memory(bytes, misalignment * size % 16, guard);
    char* at = static_cast<char*>(memory.data());
    for (const std::size_t t : tensors) {
      pointer_of(rows_[t], part) = at;
      at += bytes_of(part, t);
    }
    places_.push_back({part, tensors, uses(part, tensors.front()), std::move(memory)});
  }

  UpdateArgs<Adam> args(const std::vector<TensorRow>& rows,
                        const std::vector<std::int64_t>& offsets,
                        const std::vector<AdamParams>& groups,
                        const StepScalars* step_scalars) const {
    UpdateArgs<Adam> result;
    result.tensors = tuple_.table();
    result.tensors.rows = rows.data();
    result.tensors.offsets = offsets.data();
    result.tensors.count = static_cast<std::int64_t>(rows.size());
    result.groups = groups.data();
    result.num_groups = groups_.count();
    result.scalars = step_scalars;
    result.write_back_grads = write_back_grads;
    result.from_the_end = from_the_end;
    return result;
  }

  void update_by_cpu(Contents& contents) const {
    std::vector<TensorRow> rows(tensors_.size());
    std::vector<float> steps = steps_of(tensors_);
    for (std::size_t t = 0; t < rows.size(); ++t) {
      rows[t] = row_of(t, &steps[t]);
      for (int p = 0; p < kParts; ++p) {
        pointer_of(rows[t], static_cast<Part>(p)) =
            begin_of(contents[static_cast<std::size_t>(p)], t);
      }
    }
    fused_update_cpu<Adam>(detect_cpu_isa(), args(rows, offsets_, groups_.on_host(), &scalars), 0,
                           offsets_.back());
  }

  void expect(const Contents& expected, bool touched) {
    Contents after = before_;
    for (const Place& place : places_) {
      if (::testing::Test::HasFailure()) return;  // one is enough
      SCOPED_TRACE(name_of(place.part));
      std::vector<char> bytes(place.memory.bytes());
      place.memory.download(bytes.data());
      std::size_t at = 0;
      for (const std::size_t t : place.tensors) {
        std::memcpy(begin_of(after[place.part], t), bytes.data() + at, bytes_of(place.part, t));
        at += bytes_of(place.part, t);
        expect_same(after[place.part], expected[place.part], t);
      }
      place.memory.expect_margins_intact();
      expect_accesses(place, touched && place.used);
    }
    EXPECT_EQ(steps_.to_host(), steps_of(tensors_)) << "step counts were changed";
  }

  void expect_same(const Buffer& after, const Buffer& expected, std::size_t t) const {
    const std::int64_t numel = tensors_[t].numel;
    const auto i = first_difference(after, expected, offsets_[t], numel);
    ASSERT_EQ(i, numel) << "tensor " << t << " of " << numel << " elements differs at " << i << ": "
                        << after.get(offsets_[t] + i) << " instead of "
                        << expected.get(offsets_[t] + i);
  }

  unsigned reads_of(Part part) const { return part == kParam && tuple_.has_master ? 0 : 1; }
  unsigned writes_of(Part part) const { return part == kGrad && !write_back_grads ? 0 : 1; }

  void expect_accesses(const Place& place, bool touched) const {
    if (!accesses_are_counted()) return;
    Traffic expected;
    if (touched) {
      place.memory.expect_accesses(reads_of(place.part), writes_of(place.part));
      for (const std::size_t t : place.tensors) {
        const std::size_t instructions = instructions_for(place.part, t);
        expected.loads += instructions * reads_of(place.part);
        expected.stores += instructions * writes_of(place.part);
      }
    } else {
      place.memory.expect_accesses(0, 0);
    }
    EXPECT_EQ(place.memory.loads(), expected.loads) << "load instructions";
    EXPECT_EQ(place.memory.stores(), expected.stores) << "store instructions";
  }

  /// Accesses of one direction that a part of a tensor takes.
  std::size_t instructions_for(Part part, std::size_t t) const {
    // With a tiny coefficient all elements are single.
    const bool wide = tuple_.param == DType::kFloat64;
    if (!wide && grad_coef_of<float>(scalars.grad_coef).tiny) {
      return static_cast<std::size_t>(tensors_[t].numel);
    }
    TensorRow row = rows_[t];
    std::vector<cuda::OperandAccess> operands;
    for (int p = 0; p < kParts; ++p) {
      const Part other = static_cast<Part>(p);
      if (uses(other, t)) operands.push_back(access_of(other, row));
    }
    const std::int64_t longest = row.numel <= 512 ? 512 : chunk_of(total(), tuple_.vec());
    return instructions_of(access_of(part, row), operands, row.numel, longest, tuple_.vec());
  }

  cuda::OperandAccess access_of(Part part, TensorRow& row) const {
    return {reinterpret_cast<std::uintptr_t>(pointer_of(row, part)),
            static_cast<std::uint32_t>(size_of(tuple_.dtype(part))),
            reads_of(part) + writes_of(part)};
  }

  UpdateTuple tuple_;
  std::vector<UpdateTensor> tensors_;
  const UpdateGroups& groups_;
  DeviceArray<float> steps_;
  std::vector<std::int64_t> offsets_{0};
  std::vector<TensorRow> rows_;  ///< with the device's pointers
  std::vector<Place> places_;
  Contents before_;
};

}  // namespace torchfuse::kernels::testing
