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

/// How a checkpoint saves and loads one object; see Checkpoint::part().
struct CheckpointPart {
  /// Returns the state: a number, bool, string or tensor, or a list, tuple or dictionary of them.
  std::function<c10::IValue()> save;
  /// Checks a saved state without changing the object, throws if it does not fit, and returns the
  /// function that loads it, which must not throw.
  std::function<std::function<void()>(const c10::IValue& saved)> prepare;
};

/// The values of the program's own that a checkpoint file holds, by name.
class TORCHFUSE_API CheckpointValues {
 public:
  /// Takes the values of the file `path`; load_checkpoint() calls it.
  CheckpointValues(std::string path, std::map<std::string, c10::IValue> values);
  /// Returns a value: `values.at("epoch").toInt()`. A number has the type that it was saved with:
  /// `toDouble()` refuses an integer, and `toScalar().toDouble()` takes both.
  /// @throws c10::ValueError naming the file and its values, if it holds none of this name.
  const c10::IValue& at(const std::string& name) const;
  /// Returns whether the file holds a value of this name.
  bool contains(const std::string& name) const { return values_.contains(name); }
  std::size_t size() const { return values_.size(); }  ///< number of values
  auto begin() const { return values_.begin(); }       ///< pairs of name and value, by name
  auto end() const { return values_.end(); }           ///< end of the pairs

 private:
  std::string path_;
  std::map<std::string, c10::IValue> values_;
};

/// Describes what a checkpoint holds, for `save_checkpoint` and `load_checkpoint`. Each object has
/// a name, which is its key in the file; several of a kind need names of their own. The description
/// refers to the objects: they must outlive it.
class TORCHFUSE_API Checkpoint {
 public:
  /// Adds parameters and buffers, under the names of Python's `state_dict()` of the same module.
  /// Loading converts to the module's dtypes and devices.
  Checkpoint& model(torch::nn::Module& model, std::string name = "model");
  /// Adds options and states, in the layout of Python's `state_dict()` of the class. A
  /// parallel::ShardedOptimizer needs its group(): rank 0 gathers the states, one parameter at a
  /// time, into CPU memory, and saves them as the class alone does.
  Checkpoint& optimizer(torchfuse::optim::FusedOptimizer& optimizer,
                        std::string name = "optimizer");
  /// Adds the state of a scaler, in the layout of Python's `state_dict()`.
  Checkpoint& scaler(torchfuse::amp::GradScaler& scaler, std::string name = "scaler");
  /// Adds the position in an epoch: its number, and how many samples each process has drawn in it.
  /// Loading sets both, and the next epoch that the sampler, or a data loader's copy of it, begins
  /// continues there.
  /// @param sampler the program's sampler.
  /// @param drawn the program's own count, because a data loader draws ahead in a copy of the
  ///   sampler; 0 at the end of an epoch.
  /// @param name key in the file.
  Checkpoint& sampler(torchfuse::parallel::DistributedSampler& sampler, std::int64_t& drawn,
                      std::string name = "sampler");
  /// Adds the states of torch's default generators, of the CPU and of every CUDA device, of every
  /// process of the group.
  Checkpoint& rng(std::string name = "rng");
  /// Adds the state of a learning-rate scheduler, in the layout of Python's `state_dict()`. The
  /// rates of the groups are the optimizer's part: the scheduler of a FusedOptimizer is refused
  /// without it, unless archived() or part() adds what may hold it.
  Checkpoint& scheduler(torchfuse::optim::LRScheduler& scheduler, std::string name = "scheduler");
  /// Adds any object that saves a few plain values to archives; `load` changes all or nothing. The
  /// values are numbers, bools, strings, tensors, lists of one of these, tuples of all these, and
  /// nested archives; saving refuses others.
  Checkpoint& archived(std::string name, std::function<void(torch::serialize::OutputArchive&)> save,
                       std::function<void(torch::serialize::InputArchive&)> load);
  /// Adds any object.
  Checkpoint& part(std::string name, CheckpointPart part);
  /// Adds a value of the program's own: a number, bool, string or tensor, or a list, tuple or
  /// dictionary of them. Loading ignores it, and returns what the file holds.
  Checkpoint& value(std::string name, c10::IValue value);
  /// Saves in rank 0 of a group and loads in all its ranks; all must make the same call. All learn
  /// whether it succeeded in every rank, and throw the same error if not.
  Checkpoint& group(const torchfuse::parallel::ProcessGroup& group);

 private:
  using Dict = c10::impl::GenericDict;
  /// States by the names of their parts.
  using Saved = std::map<std::string, c10::IValue>;
  /// An optimizer whose states are sharded over processes.
  struct Sharded {
    torchfuse::optim::FusedOptimizer* optimizer;
    std::shared_ptr<parallel::Shards> shards;
  };

  Checkpoint& add(std::string name, CheckpointPart part);
  void check_schedulers(const std::string& caller) const;
  /// Returns what all processes must save together: the whole states of sharded optimizers, and the
  /// generators of all processes. A collective; complete on rank 0 only.
  Saved save_together(const checkpoint::Ranks& ranks) const;
  /// Returns the contents of the file: `saved`, and the other parts.
  Dict contents(const Saved& saved) const;

  friend TORCHFUSE_API void save_checkpoint(const std::string& path, const Checkpoint& checkpoint);
  friend TORCHFUSE_API CheckpointValues load_checkpoint(const std::string& path,
                                                        const Checkpoint& checkpoint);
  std::vector<std::pair<std::string, CheckpointPart>> parts_;
  /// Of optimizers and schedulers, by the names of their parts.
  std::map<std::string, std::string> classes_;
  bool has_others_ = false;  ///< parts of the program's own
  std::vector<const torch::optim::Optimizer*> optimizers_;
  std::map<std::string, Sharded> sharded_;
  /// By the names of the schedulers' parts.
  std::map<std::string, const torch::optim::Optimizer*> scheduled_optimizers_;
  std::map<std::string, c10::IValue> values_;
  std::optional<std::string> rng_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

/// Writes one file that Python's `torch.load(path, weights_only=True)` opens as a dictionary: each
/// part under its name, "values", and "torchfuse" with the version and the classes of
/// optimizers and schedulers.
///
///     auto checkpoint = torchfuse::Checkpoint().model(*model).optimizer(optimizer);
///     torchfuse::save_checkpoint("last.pt", checkpoint.value("epoch", 3));
///     ...
///     auto values = torchfuse::load_checkpoint("last.pt", checkpoint);
///     auto epoch = values.at("epoch").toInt();
///
/// The file is replaced in one step after all bytes are on the disk: whenever the process or the
/// machine stops, `path` holds the old file or the new one. A process that is killed may leave
/// a file behind whose name begins with `path`.tmp-.
///
/// @param path file to write or replace; for a symbolic link, the file that it points to.
/// @param checkpoint what to save.
/// @throws c10::ValueError for a value that cannot be saved, naming its keys, for a scheduler of an
///   optimizer that is not saved, and for a folder, device, pipe or socket; c10::Error if the file
///   cannot be written. `path` is as it was.
TORCHFUSE_API void save_checkpoint(const std::string& path, const Checkpoint& checkpoint);

/// Loads what `save_checkpoint`, of C++ or Python, wrote. The whole file is read and compared with
/// all objects before any of them is changed. Parts of the file that the description lacks are
/// ignored.
/// @param path file to read.
/// @param checkpoint the objects, under the names that they were saved with.
/// @return the user values, with tensors on the CPU.
/// @throws c10::ValueError naming the file and the key: for a file that is missing, truncated,
///   damaged or of another kind, for a missing part, for names, shapes, classes or options that do
///   not fit, for a scheduler of an optimizer that is not loaded, and for a model that cannot be
///   written. All objects are as they were then, in all processes.
TORCHFUSE_API CheckpointValues load_checkpoint(const std::string& path,
                                               const Checkpoint& checkpoint);

/// Checks that a pickle holds plain values and dense tensors only, as those of `torch.save` in the
/// files of `save_checkpoint`, and that it is no small one of values without end: before another
/// reader builds them.
/// @param bytes the record `data.pkl` of a file.
/// @param where begins messages, as "load_checkpoint: expected last.pt".
/// @throws c10::ValueError for other values, for values nested more than 100 deep, for one that
///   holds itself, and for more than a million values and 16 for each byte.
TORCHFUSE_API void check_pickle(std::string_view bytes, const std::string& where);

}  // namespace torchfuse
