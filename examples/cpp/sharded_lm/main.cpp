// SPDX-License-Identifier: BSD-3-Clause
// Trains a language model whose optimizer states processes share, by ZeRO stage 1:
//
//   text="$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
//   ./sharded_lm "$text" --out build/sharded/one
//   torchrun --no-python --nproc-per-node 2 ./sharded_lm "$text" --out build/sharded/two
//       --stop-after 120
//   ./sharded_lm "$text" --out build/sharded/two --resume
//   torchrun --no-python --nproc-per-node 2 --max-restarts 3 ./sharded_lm "$text"
//       --out build/sharded/restarted --resume-or-begin --checkpoint-every 20
//
// It is the counterpart of examples/python/sharded_lm.py --parallel zero, with its tokens, initial
// values, losses and options. A checkpoint, one file that rank 0 writes, resumes in any number of
// processes. Rank 0 writes <out>/log.jsonl, of which examples/python/sharded_lm_report.py
// draws the curve.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "log.h"
#include "options.h"
#include "text.h"
#include "trainer.h"

namespace {

using torchfuse::parallel::ProcessGroup;
using torchfuse::parallel::ProcessGroupOptions;

/// All processes that torchrun started, or this one alone.
ProcessGroup join() {
  if (std::getenv("RANK") != nullptr) return torchfuse::parallel::init_process_group();
  return torchfuse::parallel::init_process_group(c10::make_intrusive<c10d::HashStore>(),
                                                 ProcessGroupOptions().rank(0).world_size(1));
}

/// The last step that is asked for.
std::int64_t last_of(const lm::Options& options) {
  return options.stop_after > 0 ? std::min(options.stop_after, options.steps) : options.steps;
}

/// The step after which this run ends.
std::int64_t end_of(const lm::Options& options, std::int64_t begin) {
  const std::int64_t end = last_of(options);
  if (begin < end) return end;
  throw std::invalid_argument(options.out + " has " + std::to_string(begin) +
                              " steps already, and " + std::to_string(end) + " are asked for");
}

/// What rank 0 says at the end.
void summarize(const lm::Options& options, const std::string& layout, double tokens_per_second,
               double validation_loss, std::int64_t step) {
  std::cout << layout << ": " << std::llround(tokens_per_second)
            << " tokens per second\nvalidation loss: " << validation_loss << " after step " << step
            << ", in " << options.log() << '\n';
}

void train(const lm::Options& options, const ProcessGroup& group) {
  const lm::Corpus corpus(options.text, options.sequence);
  const lm::Batch tested = corpus.validation_batch(options.validation_samples);
  lm::Trainer trainer(options, group);
  const bool resumes = trainer.agree(options.has_checkpoint());
  const std::int64_t begin = resumes ? trainer.load(options.checkpoint()) : 0;
  if (options.resume_or_begin && begin == last_of(options)) {
    if (group.rank() == 0) std::cout << options.out << " has all " << begin << " steps already\n";
    return;
  }
  const std::int64_t end = end_of(options, begin);
  std::optional<lm::Log> log;
  if (group.rank() == 0) {
    std::filesystem::create_directories(options.out);
    log.emplace(options.log(), trainer.layout(), begin);
  }
  lm::Progress progress(trainer.layout(), options.validate_every, end);
  double validation_loss = 0;
  const auto validate = [&](std::int64_t step) {
    validation_loss = trainer.validation_loss(tested);
    if (log) log->write(step, {{"validation_loss", validation_loss}});
  };

  if (begin == 0) validate(0);
  for (std::int64_t step = begin + 1; step <= end; ++step) {
    const auto start = std::chrono::steady_clock::now();
    const lm::Measured measured = trainer.step(corpus.batch(step, options.batch));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const double speed = static_cast<double>(options.batch * options.sequence) / took.count();
    if (log) {
      log->write(step, {{"loss", measured.loss},
                        {"lr", measured.lr},
                        {"grad_norm", measured.grad_norm},
                        {"tokens_per_second", std::round(speed)}});
      progress.show(step, measured.loss, speed);
    }
    if (step % options.validate_every == 0 || step == end) validate(step);
    if (step % options.checkpoint_every == 0 || step == end) trainer.save(options.checkpoint());
  }
  if (log) {
    summarize(options, trainer.layout(), progress.tokens_per_second(), validation_loss, end);
  }
}

void run(const lm::Options& options) {
  const ProcessGroup group = join();
  lm::check(options, group.world_size());
  train(options, group);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(lm::parse(std::vector<std::string>(argv + 1, argv + argc)));
    return EXIT_SUCCESS;
  } catch (const c10::Error& error) {
    std::cerr << "sharded_lm: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "sharded_lm: " << error.what() << '\n';
  }
  return EXIT_FAILURE;
}
