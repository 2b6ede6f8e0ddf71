// SPDX-License-Identifier: BSD-3-Clause
// Converts a class's options to its algorithm's hyper-parameters and checks their ranges.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torchfuse/hyper_params.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

namespace torchfuse::optim {

template <class Options>
struct OptionsTraits;

/// Throws, naming `owner` and the option, if `violation` says what the value should have been.
template <class Value>
void check_option(const char* name, const std::string& owner, const std::string& option,
                  const std::optional<std::string>& violation, const Value& value) {
  TORCH_CHECK_VALUE(!violation, name, ": expected ", owner, ".", option, " to be ", *violation,
                    ", got ", value, ".");
}

/// An option, or one element of a pair: beta1 is betas[0].
struct OptionPart {
  const char* key;
  int half = 0;  ///< 1 or 2: element of a pair; 0: not a pair

  std::string name_in_table() const {
    const std::string whole = key;
    return half == 0 ? whole : whole.substr(0, whole.size() - 1) + std::to_string(half);
  }
  std::string as_written() const {
    return half == 0 ? key : std::string(key) + "[" + std::to_string(half - 1) + "]";
  }
};

/// Whether an option is no number. OptionsTraits::derived() computes hyper-parameters from it.
template <class Value>
constexpr bool kNoNumber = std::is_same_v<Value, std::optional<std::string>> ||
                           std::is_same_v<Value, std::optional<at::ScalarType>> ||
                           std::is_same_v<Value, std::tuple<double, double, double>>;

/// Calls visit(part, value) for every number in the options.
template <class Options, class Visit>
void visit_numbers(const Options& options, const Visit& visit) {
  visit(OptionPart{"lr"}, options.lr());
  OptionsTraits<Options>::options(options, [&](const char* key, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, std::tuple<double, double>>) {
      visit(OptionPart{key, 1}, std::get<0>(value));
      visit(OptionPart{key, 2}, std::get<1>(value));
    } else if constexpr (kNoNumber<Value>) {
      return;
    } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
      visit(OptionPart{key}, value.value_or(std::numeric_limits<double>::infinity()));
    } else {
      visit(OptionPart{key}, static_cast<double>(value));
    }
  });
  if constexpr (requires { OptionsTraits<Options>::derived(options, visit); }) {
    OptionsTraits<Options>::derived(options, visit);
  }
}

template <class Options>
const std::vector<HyperParamInfo>& table_of() {
  static const std::vector<HyperParamInfo>& table =
      hyper_params_of(OptionsTraits<Options>::kAlgorithm);
  return table;
}

/// Returns a name's index in the table, or the table's size if the option is no hyper-parameter.
template <class Options>
std::size_t place_of(const std::string& name) {
  const std::vector<HyperParamInfo>& table = table_of<Options>();
  const auto is_it = [&](const HyperParamInfo& info) { return info.name == name; };
  return std::find_if(table.begin(), table.end(), is_it) - table.begin();
}

/// Returns the table index of every number that visit_numbers() visits. Compares names only once.
template <class Options>
const std::vector<std::size_t>& places_of(const Options& options) {
  static const std::vector<std::size_t> places = [&] {
    std::vector<std::size_t> found;
    visit_numbers(options, [&](const OptionPart& part, double) {
      found.push_back(place_of<Options>(part.name_in_table()));
    });
    for (std::size_t place = 0; place < table_of<Options>().size(); ++place) {
      TORCH_INTERNAL_ASSERT(std::count(found.begin(), found.end(), place) == 1,
                            OptionsTraits<Options>::kName, ": ", table_of<Options>()[place].name);
    }
    return found;
  }();
  return places;
}

/// Returns the hyper-parameters in the order of the table.
template <class Options>
std::vector<HyperParam> hyper_params_from(const Options& options) {
  const std::vector<std::size_t>& places = places_of(options);
  std::vector<HyperParam> values(table_of<Options>().size());
  std::size_t next = 0;
  visit_numbers(options, [&](const OptionPart&, double value) {
    const std::size_t place = places[next++];
    if (place < values.size()) values[place] = value;
  });
  return values;
}

/// Throws, naming `owner` and the option, for a hyper-parameter out of its range.
template <class Options>
void check_hyper_params(const std::string& owner, const Options& options) {
  const std::vector<HyperParamInfo>& table = table_of<Options>();
  const std::vector<std::size_t>& places = places_of(options);
  const std::vector<HyperParam> values = hyper_params_from(options);
  std::size_t next = 0;
  visit_numbers(options, [&](const OptionPart& part, double value) {
    const std::size_t place = places[next++];
    if (place == table.size()) return;
    const HyperParamInfo& info = table[place];
    const auto violation = info.at_least.empty()
                               ? info.violation(value)
                               : info.violation(value, std::get<double>(values[place - 1]));
    if (violation) {
      check_option(OptionsTraits<Options>::kName, owner, part.as_written(), violation, value);
    }
  });
}

}  // namespace torchfuse::optim
