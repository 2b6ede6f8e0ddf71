// SPDX-License-Identifier: BSD-3-Clause
// Weights alone, in the safetensors format.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

#include <torchfuse/export.h>

namespace torchfuse {

/// Writes parameters and buffers of a module, under the names of Python's `state_dict()`, as one
/// safetensors file: other programs read it without running anything in it.
///
///     torchfuse::save_weights("model.safetensors", *model);
///     torchfuse::load_weights("model.safetensors", *other);
///
/// The file is replaced in one step after all bytes are on the disk, as `save_checkpoint` does it.
/// Tensors that share memory are written once for each name.
///
/// @param path file to write or replace; for a symbolic link, the file that it points to.
/// @param module what to save, on any device.
/// @param metadata texts by their names. "format" is "pt" where it is not given: readers of other
///   projects ask for it.
/// @throws c10::ValueError naming the tensor if the format cannot hold it, and for a folder,
///   device, pipe or socket; c10::Error if the file cannot be written. `path` is as it was.
TORCHFUSE_API void save_weights(const std::string& path, const torch::nn::Module& module,
                                std::map<std::string, std::string> metadata = {});

/// Reads a safetensors file, of `save_weights` or of another program, into a module. The whole file
/// is read and compared with the module before any tensor is changed. Values are converted to the
/// module's dtypes and devices.
///
/// Of parameters that are one and the same in the module, the file may leave all names but one out,
/// as Python's `safetensors.torch.save_model` does.
///
/// @param path file to read.
/// @param module where the values go.
/// @return the file's metadata.
/// @throws c10::ValueError naming the file and the tensor: for a file that is missing, truncated or
///   of another kind, for missing and unknown names, for other sizes, and for a module that cannot
///   be written. The module is as it was.
TORCHFUSE_API std::map<std::string, std::string> load_weights(const std::string& path,
                                                              torch::nn::Module& module);

}  // namespace torchfuse
