// SPDX-License-Identifier: BSD-3-Clause
// Saves and loads a module's weights, in the safetensors format.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

#include <torchfuse/export.h>

namespace torchfuse {

/// Writes a module's parameters and buffers as one safetensors file, under the names of Python's
/// `state_dict()`. Reading a safetensors file never runs code from the file.
///
///     torchfuse::save_weights("model.safetensors", *model);
///     torchfuse::load_weights("model.safetensors", *other);
///
/// The file is replaced atomically after all bytes are on the disk, as in `save_checkpoint`.
/// Tensors that share memory are written once for each name.
///
/// @param path file to write or replace; for a symbolic link, the link's target.
/// @param module module to save, on any device.
/// @param metadata strings by name (default: none). "format" defaults to "pt", which some readers
///   require.
/// @throws c10::ValueError naming the tensor if the format cannot store it; and for a folder,
///   device, pipe or socket as `path`.
/// @throws c10::Error if the file cannot be written. `path` is then unchanged.
TORCHFUSE_API void save_weights(const std::string& path, const torch::nn::Module& module,
                                std::map<std::string, std::string> metadata = {});

/// Reads a safetensors file, written by `save_weights` or another program, into a module. The whole
/// file is read and compared with the module before any tensor changes. Values are converted to the
/// module's dtypes and devices.
///
/// If several names in the module refer to one parameter, a single name in the file is enough.
/// Python's `safetensors.torch.save_model` writes such files.
///
/// @param path file to read.
/// @param module module to load into.
/// @return the file's metadata.
/// @throws c10::ValueError naming the file and the tensor: for a file that is missing, truncated or
///   in another format; for missing and unknown names; for other sizes; and for a module that
///   cannot be written. After an error, the module has not changed.
TORCHFUSE_API std::map<std::string, std::string> load_weights(const std::string& path,
                                                              torch::nn::Module& module);

}  // namespace torchfuse
