// SPDX-License-Identifier: BSD-3-Clause
// The classic mixed-precision loop with clipping, a schedule, checkpoint and resume: the C++ twin
// of examples/python/mixed_precision_loop.py.
//
//     python examples/python/export_digits.py digits
//     mixed_precision_loop digits
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "training.h"

namespace {

using tutorial::Training;

constexpr std::int64_t kSteps = 400;
constexpr std::int64_t kQuickSteps = 120;
constexpr double kMinAccuracy = 0.9;

void print_losses(const Training& training) {
  std::printf("step      loss    scale\n");
  for (const std::size_t step : {1, 2, 5, 10, 20, 50, 100, 200, 400}) {
    if (step > training.losses().size()) break;
    std::printf("%4zu  %8.5f  %7.0f\n", step, training.losses()[step - 1],
                training.scales()[step - 1]);
  }
}

digits::Digits load(const std::filesystem::path& folder, torch::Device device) {
  const digits::Digits data = digits::load_digits(folder);
  return {data.train_images.to(device), data.train_labels.to(device), data.test_images.to(device),
          data.test_labels.to(device)};
}

/// Trains without a break, and again with a checkpoint in the middle.
int run(const std::filesystem::path& folder, std::int64_t steps) {
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const digits::Digits data = load(folder, device);
  const std::int64_t stop = steps / 2;

  Training whole(device, steps);
  whole.run(data, steps, "without a break");
  print_losses(whole);
  const double accuracy = whole.accuracy(data);
  std::printf("test accuracy: %.2f%%\n", 100.0 * accuracy);

  const std::filesystem::path checkpoint = folder / "checkpoint.pt";
  Training first(device, steps);
  first.run(data, stop, "until the checkpoint");
  first.save(checkpoint);

  Training resumed(device, steps);
  resumed.load(checkpoint);
  resumed.run(data, steps - stop, "after the checkpoint");
  const bool same = torch::equal(resumed.weights(), whole.weights()) &&
                    resumed.losses() == whole.losses() && resumed.scales() == whole.scales();
  std::printf("resumed at step %lld: weights, scales and losses %s\n", static_cast<long long>(stop),
              same ? "identical to the bit" : "different");
  return same && accuracy >= kMinAccuracy ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc == 3 && std::string(argv[2]) == "--quick";
  if (argc != 2 && !quick) {
    std::fprintf(stderr,
                 "usage: mixed_precision_loop FOLDER [--quick]\n"
                 "FOLDER holds the files that `export_digits.py FOLDER` wrote.\n");
    return 2;
  }
  try {
    return run(argv[1], quick ? kQuickSteps : kSteps);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mixed_precision_loop: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
