// SPDX-License-Identifier: BSD-3-Clause
#include "options.h"

#include <torch/torch.h>

#include <charconv>
#include <fstream>
#include <map>
#include <system_error>
#include <type_traits>
#include <variant>

namespace lm {
namespace {

using Target = std::variant<std::string*, std::int64_t*, double*>;

template <typename Number>
void read(const std::string& option, const std::string& text, Number& value) {
  constexpr bool kWhole = std::is_integral_v<Number>;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  TORCH_CHECK_VALUE(error == std::errc() && rest == end, "expected ", option, " to be a ",
                    kWhole ? "whole " : "", "number, got ", text);
  // All whole ones count something.
  TORCH_CHECK_VALUE(!kWhole || value >= 1, "expected ", option, " to be at least 1, got ", text);
}

void read(const std::string&, const std::string& text, std::string& value) { value = text; }

std::map<std::string, Target> targets_in(Options& options) {
  return {{"--out", &options.out},
          {"--precision", &options.precision},
          {"--steps", &options.steps},
          {"--warm-up", &options.warm_up},
          {"--stop-after", &options.stop_after},
          {"--checkpoint-every", &options.checkpoint_every},
          {"--validate-every", &options.validate_every},
          {"--validation-samples", &options.validation_samples},
          {"--batch", &options.batch},
          {"--accumulate", &options.accumulate},
          {"--sequence", &options.sequence},
          {"--layers", &options.layers},
          {"--width", &options.width},
          {"--heads", &options.heads},
          {"--lr", &options.lr}};
}

}  // namespace

std::string Options::model() const {
  return "precision " + precision + ", sequence " + std::to_string(sequence) + ", width " +
         std::to_string(width) + ", layers " + std::to_string(layers) + ", heads " +
         std::to_string(heads);
}

bool Options::has_checkpoint() const { return std::ifstream(checkpoint()).good(); }

Options parse(const std::vector<std::string>& words) {
  TORCH_CHECK_VALUE(!words.empty() && !words[0].starts_with("--"),
                    "expected a folder with Python's sources (*.py) as the first argument");
  Options options;
  options.text = words[0];
  const auto targets = targets_in(options);
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string& option = words[i];
    if (option == "--resume" || option == "--resume-or-begin") {
      (option == "--resume" ? options.resume : options.resume_or_begin) = true;
      continue;
    }
    const auto target = targets.find(option);
    TORCH_CHECK_VALUE(target != targets.end(), "unknown argument ", option);
    TORCH_CHECK_VALUE(++i < words.size(), "expected a value behind ", option);
    std::visit([&](auto* value) { read(option, words[i], *value); }, target->second);
  }
  return options;
}

void check(const Options& options, std::int64_t processes) {
  TORCH_CHECK_VALUE(options.precision == "bf16" || options.precision == "fp32",
                    "expected --precision to be bf16 or fp32, got ", options.precision);
  TORCH_CHECK_VALUE(options.width % options.heads == 0, "expected --heads to divide --width, got ",
                    options.heads);
  const std::int64_t parts = processes * options.accumulate;
  TORCH_CHECK_VALUE(options.batch % parts == 0, "expected --batch to be a multiple of ", parts,
                    ", the processes times --accumulate, got ", options.batch);
  TORCH_CHECK_VALUE(options.validation_samples % processes == 0,
                    "expected --validation-samples to be a multiple of ", processes,
                    ", the processes, got ", options.validation_samples);
  const std::string checkpoint = options.checkpoint();
  const bool exists = options.has_checkpoint();
  TORCH_CHECK_VALUE(!exists || options.resume || options.resume_or_begin,
                    "expected an --out without a checkpoint, or --resume; ", checkpoint,
                    " is there");
  TORCH_CHECK_VALUE(exists || !options.resume, "expected the checkpoint ", checkpoint,
                    " with --resume, found none");
}

}  // namespace lm
