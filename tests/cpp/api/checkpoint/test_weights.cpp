// SPDX-License-Identifier: BSD-3-Clause
// Weights in safetensors files; tests/python/checkpoint/test_weights.py compares with the format's
// own library.
#include <torchfuse/weights.h>

#include <cstdint>
#include <fstream>

#include "checkpoint_testing.h"

namespace torchfuse::checkpoint_testing {
namespace {

/// A file with this header and so many bytes of tensors.
std::string file_of(const std::string& header, std::size_t bytes = 0) {
  std::string length(8, '\0');
  for (std::size_t at = 0; at < 8; ++at) length[at] = static_cast<char>(header.size() >> (8 * at));
  return length + header + std::string(bytes, '\1');
}

class WeightsTest : public CheckpointTest {
 protected:
  void write(const std::string& text) { std::ofstream(path_, std::ios::binary) << text; }
  std::string load_error() {
    return error_of([&] { load_weights(path_, *model_); });
  }
};

TEST_F(WeightsTest, EveryDtypeComesBack) {
  torch::nn::Module module;
  torch::nn::Module other;
  for (const auto dtype :
       {torch::kFloat64, torch::kFloat32, torch::kFloat16, torch::kBFloat16, torch::kInt64,
        torch::kInt32, torch::kInt16, torch::kInt8, torch::kUInt8, torch::kBool,
        torch::kComplexFloat, torch::kFloat8_e4m3fn, torch::kUInt16}) {
    const std::string name = c10::toString(dtype);
    module.register_buffer(name, torch::arange(6).view({2, 3}).t().to(dtype));
    other.register_buffer(name, torch::zeros({3, 2}).to(dtype));
  }
  module.register_buffer("empty", torch::zeros({0, 4}));
  other.register_buffer("empty", torch::zeros({0, 4}));
  module.register_buffer("scalar", torch::tensor(2.5));
  other.register_buffer("scalar", torch::tensor(0.0));
  save_weights(path_, module);
  load_weights(path_, other);
  for (const auto& item : module.named_buffers()) {
    const torch::Tensor loaded = other.named_buffers()[item.key()];
    EXPECT_EQ(loaded.scalar_type(), item.value().scalar_type());
    EXPECT_TRUE(
        torch::equal(loaded.to(torch::kComplexDouble), item.value().to(torch::kComplexDouble)))
        << item.key();
  }
  EXPECT_EQ(files(), std::vector<std::string>{"last.pt"});
}

TEST_F(WeightsTest, NamesAndMetadataAreAnyText) {
  torch::nn::Module module;
  const std::string name = "a\"b\\c\n\t\u00e9\U0001F600/";
  module.register_buffer(name, torch::tensor({1.0F}));
  save_weights(path_, module, {{"format", "np"}, {"quoted \"", "\x01 \u20ac"}});
  torch::nn::Module other;
  other.register_buffer(name, torch::zeros({1}));
  const auto metadata = load_weights(path_, other);
  EXPECT_EQ(metadata.at("format"), "np");
  EXPECT_EQ(metadata.at("quoted \""), "\x01 \u20ac");
  EXPECT_EQ(other.buffers()[0].item<float>(), 1.0F);
  save_weights(path_, *model_);
  EXPECT_EQ(load_weights(path_, *model_).at("format"), "pt");
}

TEST_F(WeightsTest, EscapedCharactersOfOtherWritersAreRead) {
  write(file_of(R"( { "\u0041\ud83d\ude00\/\b" : {"data_offsets":[0, 4] , "dtype":"F32",)"
                R"("shape":[ ]} } )",
                4));
  torch::nn::Module module;
  module.register_buffer("A\U0001F600/\b", torch::zeros({}));
  load_weights(path_, module);
  EXPECT_NE(module.buffers()[0].item<float>(), 0.0F);
}

TEST_F(WeightsTest, DtypesAreConverted) {
  save_weights(path_, *model_);
  Net wide;
  wide->to(torch::kFloat64);
  load_weights(path_, *wide);
  EXPECT_TRUE(torch::equal(wide->fc->weight, model_->fc->weight.to(torch::kFloat64)));
}

TEST_F(WeightsTest, OnlyNamesOfOneTensorMayBeLeftOut) {
  torch::nn::Module one;
  one.register_buffer("kept", torch::ones({2}));
  save_weights(path_, one, {{"other", "kept"}});
  torch::nn::Module tied;
  const auto shared = tied.register_buffer("kept", torch::zeros({2}));
  tied.register_buffer("left_out", shared);
  tied.register_buffer("view", shared.detach());
  load_weights(path_, tied);
  EXPECT_TRUE(torch::equal(tied.buffers()[2], torch::ones({2})));
  tied.register_buffer("other", torch::zeros({2}));
  EXPECT_ERROR(load_weights(path_, tied), "to hold 'other', got ['kept', 'left_out', 'view'].");
}

TEST_F(WeightsTest, WhatDoesNotFitChangesNothing) {
  save_weights(path_, *model_);
  Net wider(4);
  const auto before = snapshot(wider, *optimizer_);
  EXPECT_ERROR(load_weights(path_, *wider),
               "load_weights: expected " + path_ +
                   "['fc.weight'] to have the module's sizes [4, 2], got "
                   "[3, 2].");
  expect_equal(snapshot(wider, *optimizer_), before);
  torch::nn::Sequential empty;
  EXPECT_ERROR(load_weights(path_, *empty), " too. Load it into the module that was saved.");
  EXPECT_ERROR(load_weights(folder_, *model_), " to be a file, got a folder. Name the file in it.");
  EXPECT_ERROR(load_weights(folder_ + "/none", *model_), "/none to be a file, got none.");
  torch::nn::Module module;
  module.register_buffer("own", torch::zeros({2}, torch::kComplexDouble));
  EXPECT_ERROR(save_weights(path_, module),
               "save_weights: expected 'own' to have a dtype that safetensors files can hold, got "
               "ComplexDouble.");
  torch::nn::Module meta;
  meta.register_buffer("own", torch::zeros({2}, torch::kMeta));
  EXPECT_ERROR(save_weights(path_, meta), "to be a dense tensor with memory");
  torch::nn::Module named;
  named.register_buffer("__metadata__", torch::zeros({2}));
  EXPECT_ERROR(save_weights(path_, named), "to have another name: the format reserves this name.");
  torch::nn::Module latin;
  latin.register_buffer("\xe9", torch::zeros({2}));
  EXPECT_ERROR(save_weights(path_, latin), "to have a name in UTF-8, got other bytes.");
  EXPECT_ERROR(save_weights(path_, *model_, {{"place", "\xe9"}}),
               "expected metadata 'place' to be text in UTF-8");
  load_weights(path_, *model_);
}

TEST_F(WeightsTest, CutFilesAreRefusedAtEveryByte) {
  save_weights(path_, *model_);
  const std::string whole = contents(path_);
  const auto before = snapshot(model_, *optimizer_);
  for (std::size_t kept = 0; kept < whole.size(); ++kept) {
    write(whole.substr(0, kept));
    ASSERT_PRED_FORMAT2(::testing::IsSubstring, path_ + " to be a whole safetensors file",
                        load_error())
        << kept;
  }
  write(whole + "x");
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, "bytes of tensors, got", load_error());
  expect_equal(snapshot(model_, *optimizer_), before);
}

TEST_F(WeightsTest, ForeignHeadersAreRefusedByWhatIsWrong) {
  const auto refused = [&](const std::string& header, const std::string& reason) {
    write(file_of(header, 4));
    EXPECT_PRED_FORMAT2(::testing::IsSubstring, reason, load_error()) << header;
  };
  const auto entry = [](const std::string& fields) { return R"({"a":{)" + fields + "}}"; };
  refused("[]", "expected '{' at byte 0 of the header");
  refused("{\"a", "expected the end of a string that begins at byte 2");
  refused(R"({"a\x":1})", "expected an escaped character at byte 4");
  refused(R"({"\ud83d":1})", "expected both halves of a character");
  refused(R"({"\ud83d\u0041":1})", "expected the second half of a character");
  refused(R"({"\u12g4":1})", "expected four hexadecimal digits");
  refused(entry(R"("dtype":"F4","shape":[],"data_offsets":[0,4])"),
          "expected 'a' to have a supported dtype, got F4");
  refused(entry(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), "a whole number from 0");
  refused(entry(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), "a whole number from 0");
  refused(entry(R"("dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4])"),
          "a whole number from 0 to 2^63 - 1");
  refused(entry(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4])"),
          "fewer than 2^64 bytes");
  refused(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), "to have 8 bytes, got 4");
  refused(entry(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), "to begin at byte 0, got 4");
  refused(entry(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), "to begin at byte 0, got 4");
  refused(entry(R"("dtype":"F32","shape":[1])"), "a dtype, a shape and two data_offsets");
  refused(entry(R"("dtype":"F32","size":[1])"), "got 'size'");
  refused(entry(R"("dtype":"F32","shape":[1],"shape":[],"data_offsets":[0,4])"),
          "expected 'a' to have one shape, got two");
  refused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
          R"("a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
          "expected 'a' once, got it twice");
  refused(entry(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])") + "x", "expected the end");
  write(std::string(8, '\xff') + "{}");
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, "its first eight bytes announce a header of",
                      load_error());
}

}  // namespace
}  // namespace torchfuse::checkpoint_testing
