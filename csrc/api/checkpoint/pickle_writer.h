// SPDX-License-Identifier: BSD-3-Clause
// Note [Plain pickles]
// Writes plain values as a pickle that Python's torch.load(weights_only=True) reads. torch's
// pickle_save() calls torch.jit._pickle.restore_type_tag for lists and dictionaries, which
// weights_only rejects.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace torchfuse::checkpoint {

/// A pickle and its tensors: storage "i" contains the bytes of tensors[i].
struct Pickle {
  std::string bytes;
  std::vector<at::Tensor> tensors;  ///< dense, on any device, without duplicates
};

/// Pickles None, bools, ints, floats, strings, tensors, and tuples, lists and dictionaries of such
/// values. Tensors that are the same view of one storage, such as tied weights, are stored once.
/// @param where "save_checkpoint: expected <part>", for error messages.
/// @throws c10::ValueError naming the keys that lead to a value of another type.
Pickle to_pickle(const c10::IValue& value, const std::string& where);

}  // namespace torchfuse::checkpoint
