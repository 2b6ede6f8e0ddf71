// SPDX-License-Identifier: BSD-3-Clause
// Note [Plain pickles]
// Writes plain values as a pickle that Python's torch.load(weights_only=True) reads. torch's own
// pickle_save() calls torch.jit._pickle.restore_type_tag for lists and dictionaries, which
// weights_only refuses.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace torchfuse::checkpoint {

/// A pickle, and the tensors whose bytes belong to it: those of tensors[i] are the storage "i".
struct Pickle {
  std::string bytes;
  std::vector<at::Tensor> tensors;  ///< dense, on any device; one for each different tensor
};

/// Pickles None, bools, ints, floats, strings, tensors, and tuples, lists and dictionaries of them.
/// Tensors that are the same view of one storage, such as tied weights, share their bytes.
/// @param where "save_checkpoint: expected <part>", for error messages.
/// @throws c10::ValueError naming the place of a value of another type.
Pickle to_pickle(const c10::IValue& value, const std::string& where);

}  // namespace torchfuse::checkpoint
