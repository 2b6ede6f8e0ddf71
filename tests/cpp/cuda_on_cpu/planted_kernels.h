// SPDX-License-Identifier: BSD-3-Clause
// Small kernels, right and wrong ones: what the emulation must run, and what it must catch. Each
// function launches one and returns the launch's error.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu::planted {

constexpr unsigned kThreads = 256;

enum class Flaw { kNone, kPlanted };

/// out[i] = in[kThreads - 1 - i] within each block, through shared memory. Planted: no barrier.
int reverse_blocks(const float* in, float* out, unsigned blocks, Flaw flaw);

/// The last block to arrive adds up what every block left in `partials`, which is its number plus
/// one. Planted: the arrival orders no memory.
int last_block_sums(std::uint32_t* partials, std::uint32_t* arrivals, std::uint32_t* sum,
                    unsigned blocks, Flaw flaw);

/// data[i] *= 2 for i < numel. Planted: no bounds check.
int scale(float* data, unsigned numel, Flaw flaw);

/// data[i] = i for i < numel. Planted: the last element is forgotten.
int iota(float* data, unsigned numel, Flaw flaw);

/// Half of the threads wait at a barrier that the others never reach.
int divergent_barrier();
/// A lane exits before the shuffle that names it.
int shuffle_with_exited_lane();
/// A lane asks for the value of one that the mask does not name.
int shuffle_outside_mask(float* out);
/// A 16-byte load from `data`.
int load_vector(const float* data, float* out);
/// More static shared memory than there is.
int too_much_shared();
/// out[i] = what thread i finds in shared memory that nobody has written.
int read_unwritten_shared(std::uint32_t* out);

/// Results of every vote and shuffle, one row of kThreads values each.
enum class Row { kShfl, kDown, kXor, kOr, kNone, kSegment, kRows };
int collectives(std::uint32_t* out);

/// Each thread of each block appends its block's number to `sequence` before and after a barrier.
int trace(std::uint32_t* sequence, std::uint32_t* length, unsigned blocks);

/// A launch of nothing with that shape.
int launch_shape(unsigned blocks, unsigned threads, std::size_t shared_bytes);
/// A launch with 32,768 bytes of arguments.
int launch_large_arguments();

}  // namespace cuda_on_cpu::planted
