// SPDX-License-Identifier: BSD-3-Clause
// Trains a small convolutional network on handwritten digits in fp32 and in mixed precision, with
// torchfuse's optimizer, gradient clipping and loss scaler. The Python example exports the data.
//
//     python examples/python/train_digits.py --export digits
//     train_digits digits
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "measure.h"
#include "trainer.h"

namespace {

using digits::Result;

constexpr double kMinAccuracy = 0.97;
constexpr int kEpochs = 30;
// Most processors emulate fp16, ten times slower: a third of the training is enough to compare.
constexpr int kFp16OnCpuPart = 3;
constexpr double kMinAccuracyOfAPart = 0.93;
constexpr const char* kUsage =
    "usage: train_digits FOLDER [--epochs N] [--device cpu|cuda]\n"
    "FOLDER holds the files that `train_digits.py --export FOLDER` wrote.\n";

struct Arguments {
  std::string folder;
  int epochs = kEpochs;
  std::string device;
  /// Internal: train in this mode and write the numbers to `result_fd`.
  std::string mode;
  int result_fd = -1;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      arguments.folder = word;
      continue;
    }
    if (i + 1 == argc) throw std::invalid_argument("expected a value after " + word);
    const std::string value = argv[++i];
    if (word == "--epochs") {
      arguments.epochs = std::stoi(value);
    } else if (word == "--device") {
      arguments.device = value;
    } else if (word == "--mode") {
      arguments.mode = value;
    } else if (word == "--result-fd") {
      arguments.result_fd = std::stoi(value);
    } else {
      throw std::invalid_argument("unknown option " + word);
    }
  }
  if (arguments.folder.empty()) throw std::invalid_argument("expected the folder of the data");
  if (arguments.epochs < 1) throw std::invalid_argument("expected --epochs to be at least 1");
  if (arguments.device.empty()) arguments.device = torch::cuda::is_available() ? "cuda" : "cpu";
  return arguments;
}

bool trains_in_part(const Arguments& arguments, const std::string& mode) {
  return mode == "fp16" && arguments.device == "cpu";
}

int run_worker(const Arguments& arguments) {
  const int part = trains_in_part(arguments, arguments.mode) ? kFp16OnCpuPart : 1;
  const Result result =
      digits::train(arguments.mode, digits::load_digits(arguments.folder),
                    torch::Device(arguments.device), std::max(1, arguments.epochs / part));
  const bool written = write(arguments.result_fd, &result, sizeof(result)) == sizeof(result);
  return written ? EXIT_SUCCESS : EXIT_FAILURE;
}

[[noreturn]] void exec_worker(const Arguments& arguments, const std::string& mode, int result_fd) {
  const std::vector<std::string> words = {
      "train_digits", arguments.folder,         "--epochs", std::to_string(arguments.epochs),
      "--device",     arguments.device,         "--mode",   mode,
      "--result-fd",  std::to_string(result_fd)};
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execv("/proc/self/exe", argv.data());
  std::perror("cannot start the training process");
  _exit(EXIT_FAILURE);
}

/// Trains in a fresh process, so that one mode's peak memory does not hide another's.
Result run_mode(const Arguments& arguments, const std::string& mode) {
  int ends[2];
  if (pipe(ends) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  const pid_t child = fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) {
    close(ends[0]);
    exec_worker(arguments, mode, ends[1]);
  }
  close(ends[1]);
  Result result;
  const bool complete = read(ends[0], &result, sizeof(result)) == sizeof(result);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!complete || status != 0) throw std::runtime_error("training in " + mode + " failed");
  return result;
}

std::vector<std::string> choose_modes(const Arguments& arguments) {
  if (arguments.device != "cpu") {
    std::printf("device: %s\n", arguments.device.c_str());
    return {"fp32", "fp16"};
  }
  const std::vector<std::string> modes = {"fp32", "bf16", "fp16"};
  std::printf("device: CPU, %d threads\n", at::get_num_threads());
  for (std::size_t i = 1; i < modes.size(); ++i) {
    std::printf("  %s: %s\n", modes[i].c_str(), digits::cpu_support(modes[i]).c_str());
  }
  return modes;
}

int run_all(const Arguments& arguments) {
  const std::vector<std::string> modes = choose_modes(arguments);
  std::fflush(stdout);
  std::vector<Result> results;
  for (const std::string& mode : modes) results.push_back(run_mode(arguments, mode));

  std::printf("\n%-12s %20s %14s %15s %17s\n", "precision", "time/step (median)", "peak memory",
              "test accuracy", "last loss scale");
  bool reached = true;
  for (std::size_t i = 0; i < modes.size(); ++i) {
    const std::string label = modes[i] == "fp32" ? modes[i] : "mixed " + modes[i];
    std::printf("%-12s %17.2f ms %10.1f MiB %13.2f %% %17.0f\n", label.c_str(), results[i].step_ms,
                results[i].peak_mib, 100.0 * results[i].accuracy, results[i].final_scale);
    const double expected =
        trains_in_part(arguments, modes[i]) ? kMinAccuracyOfAPart : kMinAccuracy;
    if (results[i].accuracy >= expected) continue;
    reached = false;
    std::fprintf(stderr, "%s: expected a test accuracy of at least %.0f %%\n", modes[i].c_str(),
                 100.0 * expected);
  }
  return reached ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  try {
    arguments = parse(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_digits: %s\n%s", error.what(), kUsage);
    return 2;
  }
  try {
    return arguments.mode.empty() ? run_all(arguments) : run_worker(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_digits: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
