// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/lr_scheduler.h>
#include <torchfuse/parallel/distributed_sampler.h>
#include <torchfuse/parallel/process_group.h>

namespace torchfuse {

namespace checkpoint {
class Ranks;
}
namespace parallel {
class Shards;
}

/// Functions that save and load one object in a checkpoint; see Checkpoint::part().
struct CheckpointPart {
  /// Returns the state: a number, bool, string or tensor, or a list, tuple or dictionary of such
  /// values.
  std::function<c10::IValue()> save;
  /// Checks a saved state without changing the object, and throws if the state does not fit.
  /// Returns the function that loads the state, which must not throw.
  std::function<std::function<void()>(const c10::IValue& saved)> prepare;
};

/// The user values in a checkpoint file, by name.
class TORCHFUSE_API CheckpointValues {
 public:
  /// Stores values read from the file `path`. Called by load_checkpoint().
  CheckpointValues(std::string path, std::map<std::string, c10::IValue> values);
  /// Returns a value: `values.at("epoch").toInt()`. A number keeps the type it was saved with:
  /// `toDouble()` throws for an integer, but `toScalar().toDouble()` does not.
  /// @param name name given to Checkpoint::value().
  /// @throws c10::ValueError naming the file and the known values, if no value has the name.
  const c10::IValue& at(const std::string& name) const;
  /// Returns whether the file contains a value with the given name.
  bool contains(const std::string& name) const { return values_.contains(name); }
  std::size_t size() const { return values_.size(); }  ///< number of values
  auto begin() const { return values_.begin(); }       ///< pairs of name and value, by name
  auto end() const { return values_.end(); }           ///< end of the pairs

 private:
  std::string path_;
  std::map<std::string, c10::IValue> values_;
};

/// Describes the contents of a checkpoint, for `save_checkpoint` and `load_checkpoint`. Each object
/// has a name, which is its key in the file. Objects in one checkpoint need distinct names. The
/// description stores references, so the objects must outlive the description.
class TORCHFUSE_API Checkpoint {
 public:
  /// Adds parameters and buffers, under the names of Python's `state_dict()` for the same module.
  /// Loading converts values to the module's dtypes and devices.
  Checkpoint& model(torch::nn::Module& model, std::string name = "model");
  /// Adds an optimizer's options and states, in the Python class's `state_dict()` layout. A
  /// parallel::ShardedOptimizer also needs group(). Rank 0 then gathers the states into CPU memory,
  /// parameter by parameter, and saves the unsharded layout.
  Checkpoint& optimizer(torchfuse::optim::FusedOptimizer& optimizer,
                        std::string name = "optimizer");
  /// Adds a scaler's state, in the layout of Python's `state_dict()`.
  Checkpoint& scaler(torchfuse::amp::GradScaler& scaler, std::string name = "scaler");
  /// Adds the position in an epoch: the epoch number, and how many samples each process has drawn.
  /// Loading sets both. The next reset() of the sampler, or of a data loader's copy, resumes there.
  /// @param sampler the program's sampler.
  /// @param drawn number of samples drawn, counted by the program because a data loader draws ahead
  ///   in a copy of the sampler; 0 at the end of an epoch.
  /// @param name key in the file.
  Checkpoint& sampler(torchfuse::parallel::DistributedSampler& sampler, std::int64_t& drawn,
                      std::string name = "sampler");
  /// Adds the states of torch's default generators on every process in the group: the CPU generator
  /// and one per CUDA device.
  Checkpoint& rng(std::string name = "rng");
  /// Adds a learning-rate scheduler's state, in the layout of Python's `state_dict()`. The groups'
  /// rates are saved with the optimizer. A scheduler for a FusedOptimizer that is not in the
  /// checkpoint is therefore an error, unless archived() or part() adds something that may contain
  /// that optimizer.
  Checkpoint& scheduler(torchfuse::optim::LRScheduler& scheduler, std::string name = "scheduler");
  /// Adds any object that saves a few plain values to archives. `load` must change all values or
  /// none. Allowed values are numbers, bools, strings, tensors, lists with one element type,
  /// tuples, and nested archives. Saving throws for other values.
  Checkpoint& archived(std::string name, std::function<void(torch::serialize::OutputArchive&)> save,
                       std::function<void(torch::serialize::InputArchive&)> load);
  /// Adds any object.
  Checkpoint& part(std::string name, CheckpointPart part);
  /// Adds a user value: a number, bool, string or tensor, or a list, tuple or dictionary of such
  /// values. Loading ignores the value given here and returns the value in the file.
  Checkpoint& value(std::string name, c10::IValue value);
  /// Saves on rank 0 of a group and loads on all ranks. All ranks must make the same call. If the
  /// call fails on any rank, all ranks throw the same error.
  Checkpoint& group(const torchfuse::parallel::ProcessGroup& group);

 private:
  using Dict = c10::impl::GenericDict;
  /// States by part name.
  using Saved = std::map<std::string, c10::IValue>;
  /// An optimizer whose states are sharded over processes.
  struct Sharded {
    torchfuse::optim::FusedOptimizer* optimizer;
    std::shared_ptr<parallel::Shards> shards;
  };

  Checkpoint& add(std::string name, CheckpointPart part);
  void check_schedulers(const std::string& caller) const;
  /// Returns the parts that all processes must save together: the gathered states of sharded
  /// optimizers, and all processes' generators. A collective; the result is complete on rank 0
  /// only.
  Saved save_together(const checkpoint::Ranks& ranks) const;
  /// Returns the file's contents: `saved` and the other parts.
  Dict contents(const Saved& saved) const;

  friend TORCHFUSE_API void save_checkpoint(const std::string& path, const Checkpoint& checkpoint);
  friend TORCHFUSE_API CheckpointValues load_checkpoint(const std::string& path,
                                                        const Checkpoint& checkpoint);
  std::vector<std::pair<std::string, CheckpointPart>> parts_;
  /// Class names of optimizers and schedulers, by part name.
  std::map<std::string, std::string> classes_;
  bool has_others_ = false;  ///< whether archived() or part() added an object
  std::vector<const torch::optim::Optimizer*> optimizers_;
  std::map<std::string, Sharded> sharded_;
  /// Optimizers of the added schedulers, by part name.
  std::map<std::string, const torch::optim::Optimizer*> scheduled_optimizers_;
  std::map<std::string, c10::IValue> values_;
  std::optional<std::string> rng_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

/// Writes one file that Python's `torch.load(path, weights_only=True)` opens as a dictionary. Keys
/// are each part's name, "values", and "torchfuse" with the version and the class names of
/// optimizers and schedulers.
///
///     auto checkpoint = torchfuse::Checkpoint().model(*model).optimizer(optimizer);
///     torchfuse::save_checkpoint("last.pt", checkpoint.value("epoch", 3));
///     ...
///     auto values = torchfuse::load_checkpoint("last.pt", checkpoint);
///     auto epoch = values.at("epoch").toInt();
///
/// The file is replaced atomically after all bytes are on the disk. If the process or the machine
/// stops at any moment, `path` contains either the old or the new file. A killed process may leave
/// a file behind whose name begins with `path`.tmp-.
///
/// @param path file to write or replace; for a symbolic link, the link's target.
/// @param checkpoint the objects to save.
/// @throws c10::ValueError for a value that cannot be saved, naming its keys; for a scheduler whose
///   optimizer is not saved; and for a folder, device, pipe or socket as `path`.
/// @throws c10::Error if the file cannot be written. `path` is then unchanged.
TORCHFUSE_API void save_checkpoint(const std::string& path, const Checkpoint& checkpoint);

/// Loads a file written by `save_checkpoint` in C++ or Python. The whole file is read and compared
/// with all objects before any object changes. Parts of the file that are missing from the
/// description are ignored.
///
/// @param path file to read.
/// @param checkpoint the objects, under the names that they were saved with.
/// @return the user values, with tensors on the CPU.
/// @throws c10::ValueError naming the file and the key: for a file that is missing, truncated,
///   damaged or in another format; for a missing part; for names, shapes, classes or options that
///   do not fit; for a scheduler whose optimizer is not loaded; and for a model that cannot be
///   written. After an error, no object has changed on any process.
TORCHFUSE_API CheckpointValues load_checkpoint(const std::string& path,
                                               const Checkpoint& checkpoint);

/// Checks that a pickle contains only plain values and dense tensors, as files of `torch.save` and
/// `save_checkpoint` do. Also rejects a small pickle that would expand to a huge number of values.
/// Call check_pickle() before another reader builds the values.
///
/// @param bytes the record `data.pkl` of a file.
/// @param where start of error messages, such as "load_checkpoint: expected last.pt".
/// @throws c10::ValueError for other values, for nesting deeper than 100, for a value that contains
///   itself, and for more values than the larger of 2^20 and 16 per byte.
TORCHFUSE_API void check_pickle(std::string_view bytes, const std::string& where);

}  // namespace torchfuse
