// SPDX-License-Identifier: BSD-3-Clause
// The C++ side of tests/python/amp/test_autocast_program.py, which compares it with Python's
// decorators.
//
//   torchfuse_programs autocast
//
// prints what an autograd function with CustomForward and CustomBackward sees, for every state of
// autocast around its forward and its backward, every type of its inputs and every cast.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#include <torchfuse/amp/autocast.h>
#include <torchfuse/amp/custom_function.h>

#include <iostream>
#include <optional>
#include <sstream>
#include <string>

#include "../programs.h"

namespace autocast_program {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torchfuse::amp::AutocastGuard;
using torchfuse::amp::CustomBackward;
using torchfuse::amp::CustomForward;
using OptionalType = std::optional<torch::ScalarType>;

std::ostringstream line;

void print(torch::ScalarType dtype) { line << ' ' << c10::toString(dtype); }

void print_state() {
  line << (at::autocast::is_autocast_enabled(torch::kCPU) ? " on" : " off");
  print(at::autocast::get_autocast_dtype(torch::kCPU));
}

struct MatMul : torch::autograd::Function<MatMul> {
  static torch::Tensor forward(AutogradContext* ctx, torch::Tensor x, torch::Tensor weight,
                               OptionalType cast_inputs) {
    const CustomForward amp(ctx, torch::kCPU, cast_inputs);
    x = amp.cast(x);
    weight = amp.cast(weight);
    ctx->save_for_backward({x, weight});
    const torch::Tensor product = x.mm(weight);
    print_state();
    print(x.scalar_type());
    print(product.scalar_type());
    return product;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const CustomBackward amp(ctx, torch::kCPU);
    const auto saved = ctx->get_saved_variables();
    const torch::Tensor grad = grads[0].mm(saved[1].t());
    print_state();
    print(grads[0].scalar_type());
    print(grad.scalar_type());
    return {grad, saved[0].t().mm(grads[0]), {}};
  }
};

/// Runs `function` under autocast with `dtype`, or with autocast as it is.
template <class Function>
auto under_autocast(OptionalType dtype, Function&& function) {
  std::optional<AutocastGuard> autocast;
  if (dtype) autocast.emplace(torch::kCPU, *dtype);
  return function();
}

}  // namespace

void start(const Arguments& arguments) {
  TORCH_CHECK(arguments.empty(), "expected no arguments, got ", arguments.size(), ".");
  const OptionalType none;
  for (const OptionalType around_forward : {none, {torch::kHalf}, {torch::kBFloat16}}) {
    for (const OptionalType around_backward : {none, {torch::kHalf}}) {
      for (const auto input : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
        for (const OptionalType cast_inputs :
             {none, {torch::kFloat}, {torch::kHalf}, {torch::kBFloat16}}) {
          const torch::Tensor x = torch::ones({2, 2}, input).requires_grad_(true);
          const torch::Tensor weight = torch::ones({2, 2}, input);
          line.str("");
          const torch::Tensor product =
              under_autocast(around_forward, [&] { return MatMul::apply(x, weight, cast_inputs); });
          under_autocast(around_backward, [&] { product.backward(torch::ones_like(product)); });
          print(x.grad().scalar_type());
          print_state();
          std::cout << line.str().substr(1) << '\n';
        }
      }
    }
  }
}

}  // namespace autocast_program
