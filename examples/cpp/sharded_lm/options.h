// SPDX-License-Identifier: BSD-3-Clause
// The command line, with the names of the Python program's where both have an option.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lm {

struct Options {
  std::string text;  ///< folder of the files to learn from
  std::string out = "build/sharded";
  std::string precision = "bf16";
  bool resume = false;                   ///< go on from the checkpoint in `out`
  bool resume_or_begin = false;          ///< the same where there is one: for torchrun's restarts
  std::int64_t steps = 300;              ///< of the whole schedule
  std::int64_t warm_up = 20;             ///< steps
  std::int64_t stop_after = 0;           ///< step after which this run ends; 0: steps
  std::int64_t checkpoint_every = 100;   ///< steps; and at the end
  std::int64_t validate_every = 20;      ///< steps; and at the end
  std::int64_t validation_samples = 64;  ///< of all processes together
  std::int64_t batch = 16;               ///< samples of all processes together
  std::int64_t accumulate = 1;           ///< parts of each process's samples
  std::int64_t sequence = 128;           ///< tokens of a sample
  std::int64_t layers = 3;
  std::int64_t width = 96;
  std::int64_t heads = 4;
  double lr = 3e-3;  ///< the largest of the schedule

  std::string checkpoint() const { return out + "/checkpoint.pt"; }
  /// Whether this process finds one.
  bool has_checkpoint() const;
  std::string log() const { return out + "/log.jsonl"; }
  /// What a run and those that go on from its checkpoint have in common.
  std::string model() const;
};

/// Reads the command line. Throws a sentence for what it does not know.
Options parse(const std::vector<std::string>& words);

/// Throws a sentence if options do not fit each other, the processes or what is in `out`.
void check(const Options& options, std::int64_t processes);

}  // namespace lm
