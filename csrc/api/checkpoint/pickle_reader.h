// SPDX-License-Identifier: BSD-3-Clause
// Note [Nothing in a file is run]
// Reads pickles of plain values and tensors, written by Python's torch.save or to_pickle().
// A pickle is a program. This reader supports the instructions for plain values. Of the functions
// that a pickle may call by name, it supports those for building tensors, parameters and ordered
// dictionaries. The reader never calls them: it builds the values itself. All other names are
// errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace torchfuse::checkpoint {

/// Returns the storage `key` as a 1-dim tensor with `numel` elements of `dtype`. Called once per
/// key.
using ReadStorage =
    std::function<at::Tensor(const std::string& key, at::ScalarType dtype, std::int64_t numel)>;

/// Returns the unpickled value: dictionaries and lists, tuples, None, bools, ints, floats, strings
/// and tensors on the CPU. A dtype becomes its name, such as "torch.float32".
/// @param where "load_checkpoint: expected <file>", for error messages.
/// @throws c10::ValueError for other values, and for a pickle that is damaged.
c10::IValue from_pickle(std::string_view bytes, const ReadStorage& read_storage,
                        const std::string& where);

}  // namespace torchfuse::checkpoint
