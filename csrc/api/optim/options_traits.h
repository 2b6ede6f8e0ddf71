// SPDX-License-Identifier: BSD-3-Clause
// Checks, archives and comparisons of options and states, for all fused optimizers. OptionsTraits
// describes the differences between the classes.
#pragma once

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "api/optim/archive.h"
#include "api/optim/hyper_params.h"
#include "api/optim/storage_options.h"

namespace torchfuse::optim {

/// Describes the optimizer class with these options. Each class's .cpp file specializes this
/// template as a struct that derives from Named<> and has these members:
///
///     // all options that FusedOptionsOf lacks; hyper-parameters under their names, or as a pair
///     TORCHFUSE_FIELDS(options, ...)
///     // all states, in the algorithm's order
///     TORCHFUSE_FIELDS(states, ...)
///     // Optional: calls visit(part, value) for hyper-parameters that are computed from options.
///     template <class Visit> static void derived(const Options& options, const Visit& visit);
///     // Optional: throws for invalid options that the range checks accept.
///     static void check(const Options& options, const std::string& owner);
///     // Optional: whether the options use a state (default: all states). A state that the
///     // default options do not use may be created later than the other states.
///     static bool uses_state(const Options& options, std::size_t index);
///     // Optional: how many of the last states have one number per parameter.
///     static constexpr std::size_t kTensorStates;
///     // Optional: initializes a new state, which is zero before the call.
///     static void begin_state(const Options& options, FusedSlot& slot, std::size_t index);
///     // Optional: dtype options of single states, in the states' order. The last option applies
///     // to all further states.
///     TORCHFUSE_FIELDS(state_dtypes, ...)
template <class Options>
struct OptionsTraits;

/// A string literal as a template argument.
template <std::size_t size>
struct Literal {
  // NOLINTNEXTLINE(google-explicit-constructor)
  consteval Literal(const char (&literal)[size]) { std::copy_n(literal, size, text); }
  char text[size];
};

/// The class name, for messages and archives, and the algorithm's name, for FusedStep.
template <Literal name, Literal algorithm>
struct Named {
  static constexpr const char* kName = name.text;
  static constexpr const char* kAlgorithm = algorithm.text;
};

/// Defines `what(self, visit)`, which calls visit("field", self.field()) for each field.
#define TORCHFUSE_FIELDS(what, ...)                             \
  template <class Self, class Visit>                            \
  static void what(Self& self, const Visit& visit) {            \
    TORCHFUSE_RESCAN(TORCHFUSE_VISIT(visit, self, __VA_ARGS__)) \
  }
// A macro cannot call itself. TORCHFUSE_VISIT leaves a call that only another scan expands, and
// TORCHFUSE_RESCAN makes twenty scans.
#define TORCHFUSE_VISIT(visit, self, field, ...) \
  visit(#field, self.field());                   \
  __VA_OPT__(TORCHFUSE_NEXT_VISIT TORCHFUSE_PARENS(visit, self, __VA_ARGS__))
#define TORCHFUSE_NEXT_VISIT() TORCHFUSE_VISIT
#define TORCHFUSE_PARENS ()
#define TORCHFUSE_RESCAN(...) \
  TORCHFUSE_FOUR_SCANS(       \
      TORCHFUSE_FOUR_SCANS(TORCHFUSE_FOUR_SCANS(TORCHFUSE_FOUR_SCANS(__VA_ARGS__))))
#define TORCHFUSE_FOUR_SCANS(...) \
  TORCHFUSE_SCAN(TORCHFUSE_SCAN(TORCHFUSE_SCAN(TORCHFUSE_SCAN(__VA_ARGS__))))
#define TORCHFUSE_SCAN(...) __VA_ARGS__

inline void check_norm(const char* name, const std::string& owner, const char* option,
                       const std::optional<double>& value) {
  TORCH_CHECK_VALUE(!value.has_value() || *value >= 0.0, name, ": expected ", owner, ".", option,
                    " to be >= 0 or none, got ", *value, ".");
}

/// Calls visit(key, value, other's value) for the optimizer-wide options.
template <class Options, class Other, class Visit>
void visit_wide_options(Options& options, Other& other, const Visit& visit) {
  visit("max_grad_norm", options.max_grad_norm(), other.max_grad_norm());
  visit("skip_norm_above", options.skip_norm_above(), other.skip_norm_above());
  visit("write_back_grads", options.write_back_grads(), other.write_back_grads());
  visit("skip_non_finite", options.skip_non_finite(), other.skip_non_finite());
  visit("seed", options.seed(), other.seed());
  visit("ema_decay", options.ema_decay(), other.ema_decay());
  visit("ema_warmup", options.ema_warmup(), other.ema_warmup());
  visit("ema_start_step", options.ema_start_step(), other.ema_start_step());
}

/// Throws, naming the group, if an optimizer-wide option differs from `wide`.
template <class Options>
void check_wide_options(const Options& options, const Options& wide, std::size_t group) {
  visit_wide_options(options, wide, [group](const char* key, const auto& own, const auto& others) {
    TORCH_CHECK_VALUE(own == others, OptionsTraits<Options>::kName, ": expected param_groups[",
                      group, "].", key, " to equal the optimizer's own, got another value. Set ",
                      key, " to one value in the defaults and in every group with options.");
  });
}

/// Returns whether parameters with these options have the state `index`.
template <class Options>
bool uses_state(const Options& options, std::size_t index) {
  if constexpr (requires { OptionsTraits<Options>::uses_state(options, index); }) {
    return OptionsTraits<Options>::uses_state(options, index);
  }
  return true;
}

/// Returns whether the state `index` has one number per parameter.
template <class Options, class State>
bool is_tensor_state(std::size_t index) {
  if constexpr (requires { OptionsTraits<Options>::kTensorStates; }) {
    std::size_t count = 0;
    State state;
    OptionsTraits<Options>::states(state, [&](const char*, const torch::Tensor&) { ++count; });
    return index + OptionsTraits<Options>::kTensorStates >= count;
  }
  return false;
}

/// Whether states contain `momentum_start`.
template <class Options>
constexpr bool kHasStart = requires { OptionsTraits<Options>::kHasStart; };

// --- Options and states in archives --------------------------------------------------------------

/// Calls visit(key, value) for the options that every archive contains.
template <class Options, class Visit>
void visit_options(Options& options, const Visit& visit) {
  visit("lr", options.lr());
  OptionsTraits<std::remove_const_t<Options>>::options(options, visit);
  visit("master_weights", options.master_weights());
  visit("max_grad_norm", options.max_grad_norm());
  visit("write_back_grads", options.write_back_grads());
  visit("skip_non_finite", options.skip_non_finite());
}

/// Calls visit(key, value) for all options.
template <class Options, class Visit>
void visit_all_options(Options& options, const Visit& visit) {
  visit_options(options, visit);
  visit_storage_options(options, visit);
}

template <class Archive, class Options>
void read_options(Archive& archive, Options& options) {
  const std::string owner = std::string(OptionsTraits<Options>::kName) + "Options";
  Options loaded;
  visit_options(loaded,
                [&](const char* key, auto& value) { read_into(archive, owner, key, value); });
  visit_storage_options(loaded, [&](const char* key, auto& value) {
    if (holds(archive, key)) read_into(archive, owner, key, value);
  });
  options = loaded;
}

/// Calls visit(key, tensor) for every tensor in a parameter's state.
template <class Options, class State, class Visit>
void visit_tensors(State& state, const Visit& visit) {
  visit("step", state.step());
  OptionsTraits<Options>::states(state, visit);
  if constexpr (kHasStart<Options>) visit("momentum_start", state.momentum_start());
  visit("master_param", state.master_param());
  visit("param_remainder", state.param_remainder());
  visit("ema_param", state.ema_param());
}

/// Reads a parameter's tensors. As in torch, a missing tensor is undefined.
template <class Options, class Archive, class State>
void read_tensors(Archive& archive, State& state) {
  State loaded;
  visit_tensors<Options>(loaded, [&](const char* key, torch::Tensor& tensor) {
    c10::IValue value;
    if (!archive.try_read(key, value)) return;
    TORCH_CHECK_VALUE(value.isTensor(), OptionsTraits<Options>::kName,
                      "ParamState: expected the archive's ", key,
                      " to be a tensor, got a value of type ", value.tagKind(), ".");
    tensor = value.toTensor();
  });
  state = std::move(loaded);
}

// --- Comparisons ---------------------------------------------------------------------------------

/// Returns whether two objects have equal fields. visit_fields(object, visit) calls visit(key,
/// value) for each field, and same(a, b) compares two values.
template <class Fields, class Object, class Same>
bool have_same_fields(const Fields& visit_fields, const Object& lhs, const Object& rhs,
                      const Same& same) {
  bool all_same = true;
  visit_fields(lhs, [&](const char* key, const auto& mine) {
    visit_fields(rhs, [&](const char* other_key, const auto& theirs) {
      if constexpr (std::is_same_v<decltype(mine), decltype(theirs)>) {
        if (std::string_view(key) == other_key) all_same = all_same && same(mine, theirs);
      }
    });
  });
  return all_same;
}

inline bool is_same_tensor(const torch::Tensor& lhs, const torch::Tensor& rhs) {
  if (!lhs.defined() || !rhs.defined()) return lhs.defined() == rhs.defined();
  return lhs.scalar_type() == rhs.scalar_type() && lhs.device() == rhs.device() &&
         at::equal(lhs, rhs);
}

// --- The bases of options and states -------------------------------------------------------------

template <class Self>
void FusedOptionsOf<Self>::check(const std::string& owner) const {
  constexpr const char* kName = OptionsTraits<Self>::kName;
  const auto& self = static_cast<const Self&>(*this);
  check_hyper_params(owner, self);
  if constexpr (requires { OptionsTraits<Self>::check(self, owner); }) {
    OptionsTraits<Self>::check(self, owner);
  }
  check_norm(kName, owner, "max_grad_norm", max_grad_norm());
  check_norm(kName, owner, "skip_norm_above", skip_norm_above());
  check_storage_options(kName, owner, *this);
}

template <class Self>
void FusedOptionsOf<Self>::serialize(torch::serialize::InputArchive& archive) {
  read_options(archive, static_cast<Self&>(*this));
}

template <class Self>
void FusedOptionsOf<Self>::serialize(torch::serialize::OutputArchive& archive) const {
  visit_all_options(static_cast<const Self&>(*this), [&](const char* key, const auto& value) {
    archive.write(key, to_archive(value));
  });
}

template <class Self>
bool FusedOptionsOf<Self>::equals(const Self& other) const {
  const auto fields = [](const Self& options, const auto& visit) {
    visit_all_options(options, visit);
  };
  return have_same_fields(fields, static_cast<const Self&>(*this), other,
                          [](const auto& mine, const auto& theirs) { return mine == theirs; });
}

template <class Self>
double FusedOptionsOf<Self>::get_lr() const {
  return lr();
}

template <class Self>
void FusedOptionsOf<Self>::set_lr(double lr) {
  const HyperParamInfo& info = table_of<Self>()[place_of<Self>("lr")];
  check_option(OptionsTraits<Self>::kName, "options", "lr", info.violation(lr), lr);
  this->lr(lr);
}

template <class Self, class Options>
void FusedParamStateOf<Self, Options>::serialize(torch::serialize::InputArchive& archive) {
  read_tensors<Options>(archive, static_cast<Self&>(*this));
}

template <class Self, class Options>
void FusedParamStateOf<Self, Options>::serialize(torch::serialize::OutputArchive& archive) const {
  const torch::Tensor* const step = &this->step();
  visit_tensors<Options>(static_cast<const Self&>(*this), [&](const char* key, const auto& tensor) {
    if (!tensor.defined()) return;
    // torch would write the entire buffer behind the view, so write a copy of the step count.
    archive.write(key, c10::IValue(&tensor == step ? tensor.clone() : tensor.detach()));
  });
}

template <class Self, class Options>
bool FusedParamStateOf<Self, Options>::equals(const Self& other) const {
  const auto fields = [](const Self& state, const auto& visit) {
    visit_tensors<Options>(state, visit);
  };
  return have_same_fields(fields, static_cast<const Self&>(*this), other, is_same_tensor);
}

}  // namespace torchfuse::optim
