// SPDX-License-Identifier: BSD-3-Clause
// Every torchfuse op schema. Each ops/<op>.cpp registers its own implementation.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

// Steps of elementwise optimizers.
TORCH_LIBRARY(torchfuse, m) {
  // One Adam or AdamW step over lists of tensors, step counts included.
  m.def(
      "fused_adam_(Tensor(a!)[] params, Tensor[] grads, "
      "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, "
      "Tensor(e!)[] state_steps, Tensor(f!)[] master_params, *, "
      "float lr, float beta1, float beta2, float weight_decay, float eps, "
      "bool amsgrad=False, bool maximize=False, bool adam_w_mode=True, bool bias_correction=True, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");

  // One SGD step over lists of tensors, step counts included. Without momentum, `momentum_buffers`
  // may be empty.
  m.def(
      "fused_sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, "
      "Tensor(c!)[] state_steps, Tensor(d!)[] master_params, *, "
      "float lr, float momentum, float dampening, float weight_decay, "
      "bool nesterov=False, bool wd_after_momentum=False, bool maximize=False, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");

  // One Adagrad step over lists of tensors, step counts included.
  m.def(
      "fused_adagrad_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, "
      "Tensor(c!)[] state_steps, Tensor(d!)[] master_params, *, "
      "float lr, float lr_decay, float eps, float weight_decay, "
      "bool adagrad_w_mode=False, bool maximize=False, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");

  // One Lion step over lists of tensors, step counts included.
  m.def(
      "fused_lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] state_steps, Tensor(d!)[] master_params, *, "
      "float lr, float beta1, float beta2, float weight_decay, bool maximize=False, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");

  // One Muon step over lists of matrices, or an AdamW step without use_muon. Step counts included.
  m.def(
      "fused_muon_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] momentum_buffers, "
      "Tensor(e!)[] state_steps, Tensor(f!)[] master_params, *, "
      "float lr, float weight_decay, float momentum, float beta1=0.9, float beta2=0.999, "
      "float eps=1e-7, float ns_a=3.4445, float ns_b=-4.775, float ns_c=2.0315, float ns_steps=5, "
      "float matrix_dims=0, bool nesterov=True, bool use_muon=True, bool polar_express=False, "
      "bool match_rms_adamw=False, bool spectral_unclamped=False, bool ns_float32=False, "
      "bool ns_bfloat16=False, bool ns_batched=True, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
}

// Steps of layerwise optimizers.
TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  // One LAMB step over lists of tensors, step counts included.
  m.def(
      "fused_lamb_(Tensor(a!)[] params, Tensor[] grads, "
      "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] state_steps, Tensor(e!)[] master_params, *, "
      "float lr, float beta1, float beta2, float weight_decay, float eps, "
      "float min_trust_ratio=0.0, float? max_trust_ratio=None, bool bias_correction=True, "
      "bool adam_w_mode=True, bool grad_averaging=True, bool use_nvlamb=False, "
      "bool maximize=False, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");

  // One NovoGrad step over lists of tensors, step counts included. `exp_avg_norms` contains one
  // number per tensor.
  m.def(
      "fused_novograd_(Tensor(a!)[] params, Tensor[] grads, "
      "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_norms, "
      "Tensor(d!)[] state_steps, Tensor(e!)[] master_params, *, "
      "float lr, float beta1, float beta2, float weight_decay, float eps, "
      "bool bias_correction=True, bool grad_averaging=True, bool reg_inside_moment=False, "
      "bool inf_norm=False, bool init_zero=False, bool maximize=False, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");

  // One LARS step over lists of tensors, step counts included.
  m.def(
      "fused_lars_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, "
      "Tensor(c!)[] state_steps, Tensor(d!)[] master_params, *, "
      "float lr, float momentum, float weight_decay, float trust_coefficient, float eps, "
      "bool nesterov=False, bool maximize=False, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
}

// Lists of tensors, loss scales, sums over ranks.
TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  // tensors *= inv_scale. Sets found_inf to 1 if an element was not finite.
  m.def(
      "multi_tensor_unscale_(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inv_scale) -> ()");

  // L2 norm over all tensors and a flag for non-finite elements, in one read.
  m.def("multi_tensor_l2_norm(Tensor[] tensors) -> (Tensor norm, Tensor found_inf)");

  // Updates the loss scale after a step.
  m.def(
      "amp_update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor found_inf, *, "
      "float growth_factor, float backoff_factor, int growth_interval, "
      "Tensor(c!)? hysteresis_tracker=None, int hysteresis=1, float? min_scale=None, "
      "float? max_scale=None, bool dynamic=True, Tensor(d!)? counts=None, "
      "Tensor(e!)? history=None) -> ()");

  // Sums a tensor over a process group's ranks, in place.
  m.def(
      "all_reduce_sum_(Tensor(a!) tensor, str group, str caller, bool deterministic=False) -> ()");
}

// Batch normalization.
TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  // Returns each channel's moments for one rank's input, in a form that can be summed over ranks.
  m.def("batch_norm_stats(Tensor input) -> Tensor");

  // Normalizes by reduced moments and updates the running statistics. Without moments, normalizes
  // by the running statistics.
  m.def(
      "batch_norm_elemt(Tensor input, Tensor? weight, Tensor? bias, Tensor? packed, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "Tensor? residual, *, float? momentum, float eps, bool relu=False) "
      "-> (Tensor output, Tensor saved)");

  // Returns one rank's gradient sums, the gradients of weight and bias, and the residual's
  // gradient, which is grad_output behind the ReLU.
  m.def(
      "batch_norm_backward_reduce(Tensor grad_output, Tensor input, Tensor saved, Tensor? weight, "
      "Tensor? bias, Tensor? output, *, bool relu=False) "
      "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias, Tensor grad_residual)");

  // Returns the input's gradient, computed from reduced sums.
  m.def(
      "batch_norm_backward_elemt(Tensor grad_output, Tensor input, Tensor saved, Tensor sums, "
      "Tensor? weight, Tensor? bias, *, bool relu=False) -> Tensor");

  // Batch normalization with autograd, synchronized over the ranks if there is a group.
  m.def(
      "sync_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, Tensor? residual=None, "
      "Tensor? packed=None, *, bool training, float? momentum, float eps, bool relu=False, "
      "str? group=None, str caller=\"sync_batch_norm\", bool deterministic=False) "
      "-> (Tensor output, Tensor packed)");
}

// Rows.
TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  // Layer or RMS normalization over the last `normalized_dims` dimensions. Also returns each row's
  // statistics.
  m.def(
      "layer_norm_forward(Tensor input, int normalized_dims, Tensor? weight, Tensor? bias, *, "
      "float eps, bool rms=False, ScalarType? dtype=None) "
      "-> (Tensor output, Tensor mean, Tensor rstd)");

  // Returns the gradients of input, weight and bias, computed from the input or from the output.
  m.def(
      "layer_norm_backward(Tensor grad_output, Tensor source, int normalized_dims, Tensor? mean, "
      "Tensor rstd, Tensor? weight, Tensor? bias, *, bool rms=False, bool from_output=False, "
      "ScalarType? dtype=None, bool[3] output_mask=[True, True, True]) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // Both, with autograd.
  m.def(
      "layer_norm(Tensor input, int normalized_dims, Tensor? weight=None, Tensor? bias=None, *, "
      "float eps, bool rms=False, ScalarType? dtype=None, bool memory_efficient=False, "
      "str caller=\"layer_norm\") -> Tensor");

  // Softmax cross entropy of each row, log(sum(exp(row))), and the rounding error of that
  // logarithm.
  m.def(
      "softmax_cross_entropy_forward(Tensor logits, Tensor labels, *, float smoothing=0.0, "
      "int? ignore_index=None, ScalarType? dtype=None) "
      "-> (Tensor losses, Tensor log_sum_exp, Tensor rest)");

  // Returns the logits' gradient.
  m.def(
      "softmax_cross_entropy_backward(Tensor grad_losses, Tensor logits, Tensor log_sum_exp, "
      "Tensor labels, *, float smoothing=0.0, int? ignore_index=None, Tensor? rest=None) "
      "-> Tensor");

  // Both, with autograd.
  m.def(
      "softmax_cross_entropy(Tensor logits, Tensor labels, *, float smoothing=0.0, "
      "int? ignore_index=None, ScalarType? dtype=None) -> Tensor");
}

// These ops have no autograd formula here. As with torch's own ops without a formula, the result
// requires grad, and a backward pass through the result raises.
TORCH_LIBRARY_IMPL(torchfuse, Autograd, m) {
  for (const char* name :
       {"multi_tensor_l2_norm", "batch_norm_stats", "batch_norm_elemt",
        "batch_norm_backward_reduce", "batch_norm_backward_elemt", "layer_norm_forward",
        "layer_norm_backward", "softmax_cross_entropy_forward", "softmax_cross_entropy_backward"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
