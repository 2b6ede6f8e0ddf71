// SPDX-License-Identifier: BSD-3-Clause
// From the options of a class to the hyper-parameters of its algorithm, and their ranges.
#pragma once

#include <c10/util/Exception.h>
#include <torchfuse/hyper_params.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace torchfuse::optim {

template <class Options>
struct FusedClass;

/// Throws, naming `owner` and the option, if there is something that the value should have been.
template <class Value>
void check_option(const char* name, const std::string& owner, const std::string& option,
                  const std::optional<std::string>& violation, const Value& value) {
  TORCH_CHECK_VALUE(!violation, name, ": expected ", owner, ".", option, " to be ", *violation,
                    ", got ", value, ".");
}

/// visit(name, option, value) for every number in the options: its name in the algorithm's table,
/// and how a user writes it. They differ where an option is a pair: beta1 is betas[0].
template <class Options, class Visit>
void visit_numbers(const Options& options, const Visit& visit) {
  visit("lr", "lr", options.lr());
  FusedClass<Options>::options(options, [&](const std::string& key, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, std::tuple<double, double>>) {
      const std::string single = key.substr(0, key.size() - 1);
      visit(single + "1", key + "[0]", std::get<0>(value));
      visit(single + "2", key + "[1]", std::get<1>(value));
    } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
      visit(key, key, value.value_or(std::numeric_limits<double>::infinity()));
    } else {
      visit(key, key, static_cast<double>(value));
    }
  });
  if constexpr (requires { FusedClass<Options>::derived(options, visit); }) {
    FusedClass<Options>::derived(options, visit);
  }
}

template <class Options>
const std::vector<HyperParamInfo>& table_of() {
  static const std::vector<HyperParamInfo>& table =
      hyper_params_of(FusedClass<Options>::kAlgorithm);
  return table;
}

/// The place of a name in the table; its end for an option that is no hyper-parameter.
template <class Options>
std::size_t place_of(const std::string& name) {
  const std::vector<HyperParamInfo>& table = table_of<Options>();
  const auto is_it = [&](const HyperParamInfo& info) { return info.name == name; };
  return std::find_if(table.begin(), table.end(), is_it) - table.begin();
}

/// The values as a step takes them.
template <class Options>
std::vector<HyperParam> hyper_params_from(const Options& options) {
  // Names are compared once.
  static const std::vector<std::size_t> places = [&] {
    std::vector<std::size_t> found;
    visit_numbers(options, [&](const std::string& name, const std::string&, double) {
      found.push_back(place_of<Options>(name));
    });
    for (std::size_t place = 0; place < table_of<Options>().size(); ++place) {
      TORCH_INTERNAL_ASSERT(std::count(found.begin(), found.end(), place) == 1,
                            FusedClass<Options>::kName, ": ", table_of<Options>()[place].name);
    }
    return found;
  }();
  std::vector<HyperParam> values(table_of<Options>().size());
  std::size_t next = 0;
  visit_numbers(options, [&](const std::string&, const std::string&, double value) {
    const std::size_t place = places[next++];
    if (place < values.size()) values[place] = value;
  });
  return values;
}

/// Throws, naming `owner` and the option, for a hyper-parameter out of its range.
template <class Options>
void check_hyper_params(const std::string& owner, const Options& options) {
  std::map<std::string, double> seen;
  visit_numbers(options, [&](const std::string& name, const std::string& option, double value) {
    const std::size_t place = place_of<Options>(name);
    if (place == table_of<Options>().size()) return;
    const HyperParamInfo& info = table_of<Options>()[place];
    const auto violation = info.at_least.empty() ? info.violation(value)
                                                 : info.violation(value, seen.at(info.at_least));
    check_option(FusedClass<Options>::kName, owner, option, violation, value);
    seen[name] = value;
  });
}

}  // namespace torchfuse::optim
