// SPDX-License-Identifier: BSD-3-Clause
// Checkpoints of several models, schedulers and samplers.
#include <torch/serialize.h>
#include <torchfuse/optim/lr_scheduler/step_lr.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint_testing.h"

namespace torchfuse::checkpoint_testing {
namespace {

TEST_F(CheckpointTest, SeveralPartsHaveNames) {
  Net critic;
  save_checkpoint(path_, description().model(*critic, "critic"));
  const auto weight = critic->fc->weight.detach().clone();
  torch::NoGradGuard no_grad;
  critic->fc->weight.zero_();
  load_checkpoint(path_, Checkpoint().model(*critic, "critic"));
  EXPECT_TRUE(torch::equal(critic->fc->weight, weight));
  EXPECT_ERROR(description().model(*critic), "got 'model' twice");
  EXPECT_ERROR(Checkpoint().model(*critic, "values"), "got 'values'");
}

/// An object of a program's own that knows archives.
struct Counter {
  std::int64_t count = 0;
  double rate = 1.0;
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("count", c10::IValue(count));
    archive.write("rates", c10::IValue(c10::List<double>({rate})));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue read;
    archive.read("count", read);
    TORCH_CHECK_VALUE(read.toInt() >= 0, "Counter: expected count to be >= 0, got ", read.toInt());
    c10::IValue rates;
    archive.read("rates", rates);
    count = read.toInt();
    rate = rates.toDoubleVector().at(0);
  }
};

Checkpoint archive_of(Counter& counter) {
  return Checkpoint().archived(
      "counter", [&counter](torch::serialize::OutputArchive& archive) { counter.save(archive); },
      [&counter](torch::serialize::InputArchive& archive) { counter.load(archive); });
}

TEST_F(CheckpointTest, ObjectsAreSavedByTheirArchives) {
  Counter counter{7, 0.25};
  save_checkpoint(path_, archive_of(counter));
  Counter other;
  load_checkpoint(path_, archive_of(other));
  EXPECT_EQ(other.count, 7);
  EXPECT_EQ(other.rate, 0.25);
  counter.count = -1;
  save_checkpoint(path_, archive_of(counter));
  EXPECT_ERROR(load_checkpoint(path_, archive_of(other)),
               "'counter' does not fit: Counter: expected count to be >= 0, got -1");
  EXPECT_EQ(other.count, 7);
}

/// What plain values and back would make another value of.
TEST_F(CheckpointTest, ArchivesThatCannotBeLoadedAreNotSaved) {
  const auto archive = [](const c10::IValue& written, c10::IValue& read) {
    return Checkpoint().archived(
        "part", [written](auto& out) { out.write("x", written); },
        [&read](auto& in) { in.read("x", read); });
  };
  const auto refuses = [&](const c10::IValue& value, const std::string& type) {
    c10::IValue read;
    EXPECT_ERROR(
        save_checkpoint(path_, archive(value, read)),
        "save_checkpoint: 'part' cannot be saved: expected the archive's 'x' to be None, a "
        "bool, int, float, string or tensor, a list of one such type, or a tuple of these, "
        "got a value of type " +
            type + ". Write a nested archive.");
  };
  const c10::List<std::int64_t> ints({1, 2});
  refuses(c10::List<c10::List<std::int64_t>>({ints}), "List[List[int]]");
  refuses(c10::List<std::tuple<std::int64_t, std::int64_t>>({{1, 2}}), "List[Tuple[int, int]]");
  c10::Dict<std::string, std::int64_t> dict;
  dict.insert("key", 3);
  refuses(dict, "Dict[str, int]");
  refuses(c10::ivalue::Tuple::create({c10::IValue(1), c10::IValue(dict)}), "Dict[str, int]");
  const auto comes_back = [&](const c10::IValue& value) {
    c10::IValue read;
    save_checkpoint(path_, archive(value, read));
    load_checkpoint(path_, archive(value, read));
    EXPECT_EQ(read.type()->annotation_str(), value.type()->annotation_str());
    EXPECT_EQ(read, value);
  };
  comes_back(ints);
  comes_back(c10::List<std::string>({"a", "b"}));
  comes_back(c10::List<double>());
  comes_back(c10::ivalue::Tuple::create({c10::IValue(1), c10::IValue(ints), c10::IValue("text")}));
}

TEST_F(CheckpointTest, PartsHaveAllOfTheirFunctions) {
  EXPECT_ERROR(Checkpoint().part("x", {}),
               "Checkpoint: expected 'x' to have functions that save and prepare it, got an empty "
               "one.");
  EXPECT_ERROR(
      Checkpoint().archived("x", {}, {}),
      "Checkpoint: expected 'x' to have functions that save and load it, got an empty one.");
  const auto part =
      Checkpoint().part("x", {[] { return c10::IValue(1); },
                              [](const c10::IValue&) -> std::function<void()> { return nullptr; }});
  save_checkpoint(path_, part);
  EXPECT_ERROR(load_checkpoint(path_, part), "'x' does not fit: expected prepare to return a");
}

/// Files of Python did not name the class of a scheduler.
TEST_F(CheckpointTest, ASchedulersClassIsComparedIfTheFileNamesIt) {
  optim::StepLR saved(*optimizer_, 2, 0.5);
  saved.step();
  const auto save = [&]() -> c10::IValue {
    c10::impl::GenericDict state(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& [key, value] : saved.state_dict()) state.insert(key, value);
    return state;
  };
  const auto prepare = [](const c10::IValue&) { return [] {}; };
  save_checkpoint(path_, description().part("scheduler", {save, prepare}));
  optim::StepLR step(*optimizer_, 7);
  load_checkpoint(path_, description().scheduler(step));
  EXPECT_EQ(step.last_epoch(), 1);
  save_checkpoint(path_, description().scheduler(saved));
  optim::ExponentialLR other(*optimizer_, 0.5);
  EXPECT_ERROR(load_checkpoint(path_, description().scheduler(other)),
               "to hold the state of ExponentialLR as 'scheduler', got the state of StepLR.");
}

TEST_F(CheckpointTest, ASchedulerBelongsToAnOptimizerOfTheCheckpoint) {
  Net critic;
  FusedAdam critics(critic->parameters(), FusedAdamOptions(0.1));
  optim::StepLR own(*optimizer_, 2, 0.5);
  optim::StepLR others(critics, 2, 0.5);
  save_checkpoint(path_, description().scheduler(own));
  const auto before = snapshot(model_, *optimizer_);
  own.step();
  train(critic, critics);
  const std::string refused =
      ": expected 'scheduler' to be the scheduler of an optimizer in the checkpoint, got the "
      "scheduler of a FusedAdam that is not in it. Add this optimizer, or build the scheduler for "
      "an optimizer in the checkpoint.";
  EXPECT_ERROR(save_checkpoint(path_, description().scheduler(others)),
               "save_checkpoint" + refused);
  EXPECT_ERROR(load_checkpoint(path_, description().scheduler(others)),
               "load_checkpoint" + refused);
  expect_equal(snapshot(model_, *optimizer_), before);
  EXPECT_EQ(own.last_epoch(), 1);

  EXPECT_ERROR(save_checkpoint(path_, Checkpoint().scheduler(others)), "save_checkpoint" + refused);

  // With its optimizer it is taken, before or after it.
  const auto both = Checkpoint()
                        .scheduler(others, "critics schedule")
                        .optimizer(critics, "critics")
                        .optimizer(*optimizer_)
                        .scheduler(own);
  save_checkpoint(path_, both);
  load_checkpoint(path_, both);

  // A part of the program's own may hold the optimizer.
  const auto nothing = Checkpoint().scheduler(others).archived("mine", [](auto&) {}, [](auto&) {});
  save_checkpoint(path_, nothing);
  load_checkpoint(path_, nothing);

  // The description does not know the optimizers of torch.
  torch::optim::SGD sgd(critic->parameters(), torch::optim::SGDOptions(0.1));
  optim::StepLR of_torch(sgd, 2, 0.5);
  save_checkpoint(path_, description().scheduler(of_torch));
  load_checkpoint(path_, description().scheduler(of_torch));
}

TEST_F(CheckpointTest, NestedValuesThatAreSavedLoad) {
  for (const c10::IValue& innermost : {c10::IValue(1), c10::IValue(torch::ones({2}))}) {
    c10::IValue value = innermost;
    int saved = 0;
    for (int levels = 1; levels < 110; ++levels) {
      c10::impl::GenericList list(c10::AnyType::get());
      list.push_back(value);
      value = list;
      const auto nested = Checkpoint().value("x", value);
      const std::string error = error_of([&] { save_checkpoint(path_, nested); });
      if (error == "no error") {
        ++saved;
        EXPECT_EQ(error_of([&] { load_checkpoint(path_, Checkpoint()); }), error) << levels;
      } else {
        EXPECT_PRED_FORMAT2(::testing::IsSubstring, "to be nested at most 100 deep", error);
      }
    }
    EXPECT_EQ(saved, innermost.isTensor() ? 95 : 97);
  }
}

TEST_F(CheckpointTest, ASamplerContinuesInItsEpoch) {
  parallel::DistributedSampler sampler(10);
  sampler.set_epoch(4);
  sampler.reset();
  sampler.next(4);
  std::int64_t drawn = 4;
  const auto rest = sampler.next(10);
  save_checkpoint(path_, Checkpoint().sampler(sampler, drawn));
  parallel::DistributedSampler other(10);
  auto copy = other;  // as a data loader has it
  std::int64_t count = 0;
  load_checkpoint(path_, Checkpoint().sampler(other, count));
  EXPECT_EQ(count, 4);
  other.set_epoch(4);
  copy.reset();
  EXPECT_EQ(copy.next(10), rest);
  other.set_epoch(5);
  copy.reset();
  EXPECT_EQ(copy.next(20)->size(), 10U);
  for (const std::int64_t wrong : {-3, 11}) {
    drawn = wrong;
    EXPECT_ERROR(
        save_checkpoint(path_, Checkpoint().sampler(sampler, drawn)),
        "save_checkpoint: 'sampler' cannot be saved: expected drawn to be from 0 to 10, the "
        "sampler's size, got " +
            std::to_string(wrong) +
            ". Count the samples that this process has drawn in the epoch.");
  }
  parallel::DistributedSampler small(3);
  EXPECT_ERROR(load_checkpoint(path_, Checkpoint().sampler(small, count)),
               "expected the state['position'] to be from 0 to 3, the sampler's size, got 4.");
}

}  // namespace
}  // namespace torchfuse::checkpoint_testing
