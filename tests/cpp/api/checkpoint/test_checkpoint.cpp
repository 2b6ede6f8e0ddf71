// SPDX-License-Identifier: BSD-3-Clause
// Checkpoints: what is saved comes back, and what does not fit changes nothing.
#include <c10/core/InferenceMode.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torchfuse/optim/fused_lion.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <thread>

#include "checkpoint_testing.h"

namespace torchfuse::checkpoint_testing {
namespace {

TEST_F(CheckpointTest, EverythingComesBack) {
  train(model_, *optimizer_);
  amp::GradScaler scaler(at::kCPU, amp::GradScalerOptions().hysteresis(3));
  scaler.load_state_dict({4.0, 3.0, 0.25, 7, 5, 2});
  const auto list = c10::List<double>({1.5, 2.5});
  save_checkpoint(path_, description()
                             .scaler(scaler)
                             .rng()
                             .value("epoch", 3)
                             .value("best", 0.5)
                             .value("done", false)
                             .value("name", "net \u00e9")
                             .value("big", std::int64_t{1} << 40)
                             .value("none", c10::IValue())
                             .value("list", list)
                             .value("tensor", torch::arange(6).view({2, 3}).t()));
  const auto next = torch::randn({3});
  Net other;
  FusedAdam resumed(other->parameters(), FusedAdamOptions(9.0));
  amp::GradScaler other_scaler(at::kCPU);
  const auto values = load_checkpoint(
      path_, Checkpoint().model(*other).optimizer(resumed).scaler(other_scaler).rng());
  EXPECT_TRUE(torch::equal(torch::randn({3}), next));
  expect_equal(snapshot(other, resumed), snapshot(model_, *optimizer_));
  EXPECT_EQ(resumed.param_groups()[0].options().get_lr(), 0.1);
  EXPECT_EQ(other_scaler.get_scale(), 4.0);
  EXPECT_EQ(other_scaler.state_dict()->growth_tracker, 5);
  EXPECT_EQ(other_scaler.state_dict()->hysteresis_tracker, 2);
  EXPECT_EQ(values.at("epoch").toInt(), 3);
  EXPECT_EQ(values.at("best").toDouble(), 0.5);
  EXPECT_FALSE(values.at("done").toBool());
  EXPECT_EQ(values.at("name").toStringRef(), "net \u00e9");
  EXPECT_EQ(values.at("big").toInt(), std::int64_t{1} << 40);
  EXPECT_TRUE(values.at("none").isNone());
  EXPECT_EQ(values.at("list").toList().get(1).toDouble(), 2.5);
  EXPECT_TRUE(torch::equal(values.at("tensor").toTensor(), torch::arange(6).view({2, 3}).t()));
  EXPECT_EQ(files(), std::vector<std::string>{"last.pt"});
}

TEST_F(CheckpointTest, ValuesAreFoundByName) {
  save_checkpoint(path_, Checkpoint().value("step", 3).value("best", 1));
  const CheckpointValues values = load_checkpoint(path_, Checkpoint());
  EXPECT_EQ(values.size(), 2U);
  std::string names;
  for (const auto& [name, value] : values) names += name + " ";
  EXPECT_EQ(names, "best step ");
  EXPECT_TRUE(values.contains("best"));
  EXPECT_FALSE(values.contains("epoch"));
  EXPECT_EQ(values.at("best").toScalar().toDouble(), 1.0);
  EXPECT_ERROR(values.at("epoch"), "load_checkpoint: expected " + path_ +
                                       " to hold a value 'epoch', got 'best', 'step'. Save it "
                                       "with value(\"epoch\", ...).");
  save_checkpoint(path_, Checkpoint());
  EXPECT_ERROR(load_checkpoint(path_, Checkpoint()).at("epoch"), "value 'epoch', got none.");
}

TEST_F(CheckpointTest, OtherDtypesAreConverted) {
  train(model_, *optimizer_);
  save_checkpoint(path_, description());
  Net wide;
  wide->to(torch::kFloat64);
  FusedAdam resumed(wide->parameters(), FusedAdamOptions(0.1));
  load_checkpoint(path_, Checkpoint().model(*wide).optimizer(resumed));
  EXPECT_EQ(wide->fc->weight.scalar_type(), torch::kFloat64);
  EXPECT_TRUE(torch::equal(wide->fc->weight, model_->fc->weight.to(torch::kFloat64)));
  wide->fc->weight.mutable_grad() = torch::ones_like(wide->fc->weight);
  resumed.step();
}

TEST_F(CheckpointTest, WhatDoesNotFitChangesNothing) {
  save_checkpoint(path_, description());
  train(model_, *optimizer_);
  const auto before = snapshot(model_, *optimizer_);
  Net wider(4);
  EXPECT_ERROR(load_checkpoint(path_, Checkpoint().optimizer(*optimizer_).model(*wider)),
               path_ +
                   "'s 'model' does not fit: expected the state['fc.weight'] to have the module's "
                   "sizes [4, 2], got [3, 2].");
  torch::nn::Linear linear(2, 3);
  EXPECT_ERROR(load_checkpoint(path_, Checkpoint().model(*linear)),
               "expected the state to hold 'weight', got ['fc.weight', 'fc.bias', ");
  torch::nn::Sequential empty;
  EXPECT_ERROR(load_checkpoint(path_, Checkpoint().model(*empty)), "got 'fc.weight' too.");
  optim::FusedLion lion(model_->parameters());
  EXPECT_ERROR(load_checkpoint(path_, Checkpoint().model(*model_).optimizer(lion)),
               "to hold the state of FusedLion as 'optimizer', got the state of FusedAdam.");
  amp::GradScaler scaler(at::kCPU);
  EXPECT_ERROR(load_checkpoint(path_, description().scaler(scaler)),
               "expected " + path_ +
                   " to hold 'scaler', got ['model', 'optimizer', 'values', "
                   "'torchfuse'].");
  FusedAdam two(std::vector<torch::Tensor>{model_->fc->weight});
  EXPECT_ERROR(
      load_checkpoint(path_, Checkpoint().model(*model_).optimizer(two)),
      "'optimizer' does not fit: FusedAdam: expected the archive's param_groups[0] to have "
      "1 parameters, got 4.");
  expect_equal(snapshot(model_, *optimizer_), before);
  torch::nn::Module complex;
  complex.register_buffer("own", torch::ones({2}, torch::kComplexFloat));
  save_checkpoint(path_, Checkpoint().model(complex));
  torch::nn::Module real;
  real.register_buffer("own", torch::zeros({2}));
  EXPECT_ERROR(load_checkpoint(path_, Checkpoint().model(real)),
               "expected the state['own'] to be real, because the module's tensor is Float, got "
               "ComplexFloat.");
}

TEST_F(CheckpointTest, TruncatedAndForeignFilesAreRefusedByName) {
  save_checkpoint(path_, description().value("tensor", torch::rand({8192})));
  train(model_, *optimizer_);
  const auto before = snapshot(model_, *optimizer_);
  const std::string cut = folder_ + "/cut.pt";
  const std::string whole = contents(path_);
  const std::size_t size = whole.size();
  const auto keep = [&](std::size_t kept) {
    std::ofstream(cut, std::ios::binary) << whole.substr(0, kept);
  };
  ASSERT_GT(size, 32'768U);
  for (std::size_t kept = 0; kept < size; kept += 4096) {
    keep(kept);
    EXPECT_ERROR(load_checkpoint(cut, description()),
                 "load_checkpoint: expected " + cut + " to be a whole file");
  }
  keep(size - 1);
  EXPECT_ERROR(load_checkpoint(cut, description()), cut + " to be a whole file");
  torch::save(model_, cut);
  EXPECT_ERROR(load_checkpoint(cut, description()), "an archive of TorchScript");
  std::ofstream(cut) << "text";
  EXPECT_ERROR(load_checkpoint(cut, description()), cut + " to be a whole file");
  EXPECT_ERROR(load_checkpoint(folder_, description()), " to be a file, got a folder.");
  EXPECT_ERROR(load_checkpoint(folder_ + "/none.pt", description()),
               "none.pt to be a file, got none");
  const std::string pipe = folder_ + "/pipe.pt";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_ERROR(load_checkpoint(pipe, description()), "pipe.pt to be a file, got a pipe or device.");
  expect_equal(snapshot(model_, *optimizer_), before);
}

/// Models are loaded last: what they cannot take is known before.
TEST_F(CheckpointTest, ModelsThatCannotBeWrittenChangeNothing) {
  const auto refuses = [&](const torch::Tensor& buffer, const std::string& reason) {
    Net other;
    other->register_buffer("own", torch::zeros({3}, buffer.scalar_type()));
    FusedAdam optimizer(other->parameters(), FusedAdamOptions(0.5));
    train(other, optimizer);
    save_checkpoint(path_, Checkpoint().optimizer(optimizer).model(*other));
    Net net;
    net->register_buffer("own", buffer);
    const auto before = snapshot(net, *optimizer_);
    EXPECT_ERROR(load_checkpoint(path_, Checkpoint().optimizer(*optimizer_).model(*net)),
                 path_ + "'s 'model' does not fit: expected the state['own'] to " + reason);
    EXPECT_EQ(optimizer_->param_groups()[0].options().get_lr(), 0.1);
    if (!buffer.is_meta()) expect_equal(snapshot(net, *optimizer_), before);
  };
  refuses(torch::zeros({1}).expand({3}), "go to a tensor with memory for each element, got an");
  refuses(torch::zeros({3}, torch::kMeta),
          "go to a tensor with memory, got one on the device meta");
  const auto inference = [] {
    const c10::InferenceMode guard;
    return torch::zeros({3});
  }();
  refuses(inference, "go to a tensor that can be written, got one made in inference mode.");
  // In inference mode they can be loaded.
  const c10::InferenceMode guard;
  Net served;
  save_checkpoint(path_, Checkpoint().model(*model_));
  load_checkpoint(path_, Checkpoint().model(*served));
  EXPECT_TRUE(torch::equal(served->fc->weight, model_->fc->weight));
}

TEST_F(CheckpointTest, FlippedBitsAreRefused) {
  train(model_, *optimizer_);
  save_checkpoint(path_, description());
  const auto before = snapshot(model_, *optimizer_);
  const std::string whole = contents(path_);
  std::size_t refused = 0;
  for (std::size_t bit = 3; bit < 8 * whole.size(); bit += 59) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    std::ofstream(path_, std::ios::binary) << flipped;
    refused += error_of([&] { load_checkpoint(path_, description()); }) != "no error";
    expect_equal(snapshot(model_, *optimizer_), before);
  }
  EXPECT_GT(refused, 100U);
  const float weight = model_->fc->weight.flatten()[0].item<float>();
  std::string other = whole;
  const std::size_t at = other.find(std::string(reinterpret_cast<const char*>(&weight), 4));
  ASSERT_NE(at, std::string::npos);
  other[at + 3] = static_cast<char>(other[at + 3] ^ 0x40);
  std::ofstream(path_, std::ios::binary) << other;
  EXPECT_ERROR(load_checkpoint(path_, description()),
               "load_checkpoint: expected " + path_ +
                   " to hold data/0 as it was written, got other bytes: the file is damaged. Load "
                   "another checkpoint.");
  expect_equal(snapshot(model_, *optimizer_), before);
}

TEST_F(CheckpointTest, OnlyFilesAreReplaced) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_ERROR(save_checkpoint(path_, description()),
               "save_checkpoint: expected " + path_ +
                   " to be a file or a new name, got a device, pipe or socket");
  struct stat found{};
  ASSERT_EQ(::stat(path_.c_str(), &found), 0);
  EXPECT_TRUE(S_ISFIFO(found.st_mode));
  EXPECT_EQ(files(), std::vector<std::string>{"last.pt"});
}

/// Python could not open the file.
TEST_F(CheckpointTest, OnlyTextInUtf8IsSaved) {
  for (const char* text : {"\xff", "a\x80", "\xc3", "\xc0\xaf", "\xe2\x82", "\xf4\x90\x80\x80"}) {
    EXPECT_ERROR(save_checkpoint(path_, Checkpoint().value("x", std::string(text))),
                 "save_checkpoint: expected the checkpoint['values']['x'] to hold text in UTF-8, "
                 "got other bytes. Store them in a uint8 tensor.");
    EXPECT_ERROR(save_checkpoint(path_, Checkpoint().value(text, 1)),
                 "expected the checkpoint['values'] to hold text in UTF-8");
  }
  const std::string text = "\x7f\xc3\xa9\xe2\x82\xac\xf0\x9f\x8e\x89";
  save_checkpoint(path_, Checkpoint().value("x", text));
  EXPECT_EQ(load_checkpoint(path_, Checkpoint()).at("x").toStringRef(), text);
}

TEST_F(CheckpointTest, AFailedSaveLeavesTheOldFile) {
  save_checkpoint(path_, Checkpoint().value("number", 1));
  EXPECT_ERROR(save_checkpoint(folder_, Checkpoint()), "to be a file, got a folder");
  EXPECT_ERROR(save_checkpoint(folder_ + "/absent/last.pt", Checkpoint()), "could not create");
  EXPECT_ERROR(
      save_checkpoint(path_, Checkpoint().value("bad", c10::IValue(c10::Device(at::kCPU)))),
      "save_checkpoint: expected the checkpoint['values']['bad'] to be None, a bool, int, float");
  // A file system that is full, as far as this process can see.
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  for (const rlim_t bytes : {0U, 100U, 40'000U, 90'000U}) {
    small.rlim_cur = bytes;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    EXPECT_ERROR(save_checkpoint(path_, Checkpoint().value("tensor", torch::rand({25'000}))),
                 "save_checkpoint: could not write " + path_ +
                     ": File too large. An existing file is unchanged.");
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    EXPECT_EQ(load_checkpoint(path_, Checkpoint()).at("number").toInt(), 1);
    EXPECT_EQ(files(), std::vector<std::string>{"last.pt"});
  }
  std::signal(SIGXFSZ, handler);
}

TEST_F(CheckpointTest, TheTargetOfALinkIsWritten) {
  const std::string link = folder_ + "/link.pt";
  ASSERT_EQ(::symlink("target.pt", link.c_str()), 0);
  for (int time = 0; time < 2; ++time) {  // a new file, then one that is replaced
    save_checkpoint(link, Checkpoint().value("time", time));
    EXPECT_EQ(files(), (std::vector<std::string>{"link.pt", "target.pt"}));
    EXPECT_EQ(load_checkpoint(folder_ + "/target.pt", Checkpoint()).at("time").toInt(), time);
  }
}

TEST_F(CheckpointTest, ALoadSeesOneFileWhileAnotherReplacesIt) {
  save_checkpoint(path_, description());
  std::atomic<bool> stop{false};
  std::thread saver([&] {
    for (std::int64_t number = 0; !stop; ++number) {
      save_checkpoint(path_, description().value("number", number));
    }
  });
  for (int time = 0; time < 300; ++time) EXPECT_NO_THROW(load_checkpoint(path_, Checkpoint()));
  stop = true;
  saver.join();
}

TEST(CheckPickle, SharedValuesCountEachTime) {
  const std::string begin = "\x80\x02";
  std::string tuples = ")q";
  tuples += '\0';
  std::string lists = "]q";
  lists += '\0';
  for (char level = 1; level < 90; ++level) {
    const char before = static_cast<char>(level - 1);
    tuples += {'h', before, '\x86', 'q', level};
    lists += {']', 'q', level, '(', 'h', before, 'h', before, 'e'};
  }
  const std::string expected = "x.pt to hold at most 1048576 values, got more from shared ones";
  for (const std::string& values : {tuples + ".", "(" + lists + "t."}) {
    EXPECT_ERROR(check_pickle(begin + values, "x.pt"), expected);
  }
  // A list twice in a list, as torch.save writes it.
  EXPECT_NO_THROW(check_pickle(begin + "]q\1(]q\2K\7ah\2e.", "x.pt"));
  EXPECT_ERROR(check_pickle(begin + "]q\1h\1a.", "x.pt"), "to hold no value that holds itself");
}

}  // namespace
}  // namespace torchfuse::checkpoint_testing
