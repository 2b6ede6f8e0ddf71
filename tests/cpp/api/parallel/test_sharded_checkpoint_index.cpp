// SPDX-License-Identifier: BSD-3-Clause
// The index of a sharded checkpoint that does not describe its files, as one made by hand may.
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/sharded_optimizer.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "sharded_folder.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using parallel::ProcessGroup;
using parallel::ShardedOptimizer;

c10::impl::GenericDict dict_of(const std::vector<std::pair<c10::IValue, c10::IValue>>& entries) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [key, value] : entries) dict.insert_or_assign(key, value);
  return dict;
}

c10::IValue list_of(const std::vector<c10::IValue>& values) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& value : values) list.push_back(value);
  return list;
}

c10::IValue ints(const std::vector<std::int64_t>& numbers) {
  return c10::ivalue::Tuple::create(std::vector<c10::IValue>(numbers.begin(), numbers.end()));
}

/// Where a state of a parameter of four elements is said to be.
struct Place {
  std::string dtype = "float32";
  std::vector<std::int64_t> strides{1};
  std::vector<std::vector<std::int64_t>> spans{{0, 0, 4}};
};

/// What loading says of an index that was made by hand, with one file that holds a float.
void expect_damaged(const Place& place, const std::string& end) {
  const ShardedFolder folder;
  const std::string file = folder / "rank0-0123456789abcdef.pt";
  const auto value_part = [](const c10::IValue& value) {
    return CheckpointPart{[value] { return value; }, [](const c10::IValue&) { return [] {}; }};
  };
  const auto state = [](const c10::IValue& value) {
    return dict_of({{0, dict_of({{"exp_avg", value}})}});
  };
  save_checkpoint(file, Checkpoint().part("optimizer", value_part(state(torch::ones({1})))));
  const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(file));
  const c10::IValue name(std::filesystem::path(file).filename().string());
  const auto sharded = dict_of({{"format", 1},
                                {"files", list_of({c10::ivalue::Tuple::create({name, bytes})})},
                                {"optimizers", list_of({"optimizer"})}});
  std::vector<c10::IValue> spans;
  for (const auto& span : place.spans) spans.push_back(ints(span));
  const auto placed = dict_of({{"dtype", place.dtype},
                               {"sizes", ints({4})},
                               {"strides", ints(place.strides)},
                               {"spans", list_of(spans)}});
  const auto optimizer = dict_of(
      {{"state", state(placed)}, {"param_groups", list_of({dict_of({{"params", list_of({0})}})})}});
  const auto contents = dict_of(
      {{"optimizer", optimizer}, {"values", dict_of({})}, {"torchfuse", dict_of({{"format", 1}})}});
  // Entries that an index does not need are left alone.
  save_checkpoint(
      folder / "index.pt",
      Checkpoint().part("sharded", value_part(sharded)).part("checkpoint", value_part(contents)));
  expect_refusal(
      c10::str(kLoads, folder / "index.pt", "'s 'optimizer' does not fit: ",
               end.starts_with("[") ? c10::str(kLoads, "expected ", file) : "", end),
      [&](ProcessGroup& group) {
        const std::vector<torch::Tensor> params{torch::ones({4}, torch::requires_grad())};
        ShardedOptimizer<optim::FusedAdam> optimizer(params, {}, group);
        load_sharded_checkpoint(folder.path(), Checkpoint().optimizer(optimizer).group(group));
      });
}

TEST(ShardedCheckpointIndex, ThatDoesNotDescribeTheFilesIsRefused) {
  const std::string state = "expected state[0]['exp_avg'] to hold ";
  expect_damaged({.dtype = "float33"}, state + "'dtype' as the name of one, got another value: ");
  expect_damaged({.strides = {2}}, state + "strides without gaps, got another value: the index");
  expect_damaged({.strides = {1, 1}}, state + "strides without gaps, got");
  expect_damaged({.spans = {{0, 0, 3}}}, state + "'spans' of all 4 elements, got another value");
  for (const std::vector<std::int64_t>& second :
       std::vector<std::vector<std::int64_t>>{{0, 2, 4}, {1, 1, 4}, {0, 1, 1}, {0, 1}}) {
    expect_damaged({.spans = {{0, 0, 1}, second}}, state + "'spans' one behind the other, got");
  }
  expect_damaged({.spans = {{0, 0, 1}, {0, 1, -4}}}, state + "each of its 'spans' as a tuple of");
  // The file has another tensor there.
  expect_damaged({},
                 "['optimizer'][0]['exp_avg'] to have 4 elements of Float, as index.pt says, "
                 "got [1] of Float.");
}

}  // namespace
}  // namespace torchfuse::sharded_testing
