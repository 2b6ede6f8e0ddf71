// SPDX-License-Identifier: BSD-3-Clause
// Times the CPU kernels alone on one thread, at every instruction level of this processor, so that
// host overhead and kernel time are never confused. Prints one line per kernel, level and size.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "kernels/cpu/isa.h"
#include "kernels/functors/adam.h"
#include "kernels/fused_optimizer.h"
#include "kernels/multi_tensor_l2_norm.h"

namespace {

using namespace torchfuse::kernels;

constexpr int kRounds = 15;

/// Median seconds of one call.
double median_seconds(const std::function<void()>& function) {
  function();
  std::vector<double> samples;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    function();
    samples.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(samples.begin(), samples.begin() + kRounds / 2, samples.end());
  return samples[kRounds / 2];
}

void report(const char* kernel, CpuIsa isa, std::int64_t numel, int bytes_per_element,
            const std::function<void()>& function) {
  const double seconds = median_seconds(function);
  const double elements = static_cast<double>(numel);
  std::printf("%-16s %-9s %10lld elements %8.3f ns/element %7.1f GB/s\n", kernel, name_of(isa),
              static_cast<long long>(numel), 1e9 * seconds / elements,
              bytes_per_element * elements / seconds / 1e9);
}

/// One tensor of `numel` elements with all streams of type `dtype`.
class Problem {
 public:
  Problem(DType dtype, std::int64_t numel) {
    const std::size_t bytes = size_of(dtype) * static_cast<std::size_t>(numel);
    // 0x3c in every byte is a small positive number in fp32 (0.0115) and in bf16 (0.0115).
    for (auto& buffer : buffers_) buffer.assign(bytes, 0x3c);
    row_.param = buffers_[0].data();
    row_.grad = buffers_[1].data();
    row_.state[0] = buffers_[2].data();
    row_.state[1] = buffers_[3].data();
    row_.step = &step_;
    row_.numel = numel;
    offsets_[1] = numel;
    table_.rows = &row_;
    table_.offsets = offsets_;
    table_.count = 1;
    table_.param = table_.grad = dtype;
    for (DType& state : table_.state) state = dtype;
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const TensorTable& table() const { return table_; }

 private:
  std::vector<std::uint8_t> buffers_[4];
  std::int64_t offsets_[2] = {0, 0};
  float step_ = 1.0f;
  TensorRow row_;
  TensorTable table_;
};

void bench_adam(CpuIsa isa, const char* name, DType dtype, std::int64_t numel) {
  const Problem problem(dtype, numel);
  AdamParams group;
  group.lr.value = 1e-3;
  group.beta1.value = 0.9;
  group.beta2.value = 0.999;
  group.eps.value = 1e-8;
  group.weight_decay.value = 0.01;
  const StepScalars scalars{1.0, 0.0f, 0.0f};
  UpdateArgs<Adam> args;
  args.tensors = problem.table();
  args.groups = &group;
  args.num_groups = 1;
  args.scalars = &scalars;
  report(name, isa, numel, 7 * static_cast<int>(size_of(dtype)),
         [&] { fused_update_cpu<Adam>(isa, args, 0, numel); });
}

void bench_norm(CpuIsa isa, std::int64_t numel) {
  const Problem problem(DType::kFloat32, numel);
  const std::int64_t chunk_offsets[2] = {0, num_norm_chunks(numel)};
  std::vector<NormPartial> partials(static_cast<std::size_t>(chunk_offsets[1]));
  L2NormArgs args;
  args.tensors = problem.table();
  args.chunk_offsets = chunk_offsets;
  args.partials = partials.data();
  report("l2_norm fp32", isa, numel, 4, [&] { multi_tensor_l2_norm_cpu(isa, args, 0, numel); });
}

}  // namespace

int main() {
  const CpuIsa levels[] = {CpuIsa::kBaseline, CpuIsa::kAvx2, CpuIsa::kAvx512};
  const std::int64_t cached = std::int64_t{1} << 14;
  const std::int64_t in_memory = std::int64_t{1} << 25;
  for (const std::int64_t numel : {cached, in_memory}) {
    for (const CpuIsa isa : levels) {
      if (isa > detect_cpu_isa()) continue;
      bench_adam(isa, "adam fp32", DType::kFloat32, numel);
      bench_adam(isa, "adam bf16", DType::kBFloat16, numel);
      bench_norm(isa, numel);
    }
  }
  return 0;
}
