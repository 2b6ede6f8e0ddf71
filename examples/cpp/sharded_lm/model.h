// SPDX-License-Identifier: BSD-3-Clause
// A small decoder-only language model: that of examples/python/sharded_lm_model.py, with its names
// of parameters and, after the same seed, its initial values.
#pragma once

#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdint>
#include <vector>

namespace lm {

inline torch::nn::Linear linear(std::int64_t in, std::int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

inline torchfuse::nn::FusedRMSNorm rms_norm(std::int64_t width) {
  return torchfuse::nn::FusedRMSNorm(std::vector<std::int64_t>{width});
}

/// Each token looks at those before it.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl(std::int64_t width, std::int64_t heads)
      : heads(heads),
        query(register_module("query", linear(width, width))),
        key(register_module("key", linear(width, width))),
        value(register_module("value", linear(width, width))),
        out(register_module("out", linear(width, width))) {}

  /// [N, tokens, width] to the same shape.
  torch::Tensor forward(const torch::Tensor& x) {
    const auto in_heads = [this](const torch::Tensor& y) {
      return y.unflatten(-1, {heads, -1}).transpose(1, 2);
    };
    // One after another, as in Python: the order of a call's arguments is open, and that in which
    // gradients are added up follows from it.
    const torch::Tensor q = in_heads(query(x));
    const torch::Tensor k = in_heads(key(x));
    const torch::Tensor v = in_heads(value(x));
    const torch::Tensor mixed = torch::scaled_dot_product_attention(
        q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return out(mixed.transpose(1, 2).flatten(2));
  }

  std::int64_t heads;
  torch::nn::Linear query, key, value, out;
};
TORCH_MODULE(Attention);

/// Attention and a pair of layers, each added to what comes in.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads)
      : attention_norm(register_module("attention_norm", rms_norm(width))),
        attention(register_module("attention", Attention(width, heads))),
        norm(register_module("norm", rms_norm(width))),
        up(register_module("up", linear(width, 4 * width))),
        down(register_module("down", linear(4 * width, width))) {}

  /// [N, tokens, width] to the same shape.
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = x + attention(attention_norm(x));
    return y + down(torch::gelu(up(norm(y))));
  }

  torchfuse::nn::FusedRMSNorm attention_norm;
  Attention attention;
  torchfuse::nn::FusedRMSNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

/// Tokens to logits of the tokens that follow.
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl(std::int64_t vocabulary, std::int64_t sequence, std::int64_t width,
                    std::int64_t layers, std::int64_t heads)
      : tokens(register_module("tokens", torch::nn::Embedding(vocabulary, width))),
        positions(register_module("positions", torch::nn::Embedding(sequence, width))),
        blocks(register_module("blocks", torch::nn::Sequential())) {
    for (std::int64_t layer = 0; layer < layers; ++layer) blocks->push_back(Block(width, heads));
    norm = register_module("norm", rms_norm(width));
    head = register_module("head", linear(width, vocabulary));
    for (const auto& embedding : {tokens, positions}) {
      torch::nn::init::normal_(embedding->weight, 0.0, 0.02);
    }
  }

  /// [N, tokens] to [N, tokens, vocabulary].
  torch::Tensor forward(const torch::Tensor& input) {
    const torch::Tensor places = torch::arange(input.size(1), input.device());
    return head(norm(blocks->forward(tokens(input) + positions(places))));
  }

  torch::nn::Embedding tokens, positions;
  torch::nn::Sequential blocks;
  torchfuse::nn::FusedRMSNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(LanguageModel);

}  // namespace lm
