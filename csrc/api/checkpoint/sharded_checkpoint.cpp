// SPDX-License-Identifier: BSD-3-Clause
// A checkpoint in a folder, with a file for each rank: see Note [Sharded checkpoints].
#include <torchfuse/checkpoint.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <system_error>

#include "api/checkpoint/agreement.h"
#include "api/checkpoint/atomic_file.h"
#include "api/checkpoint/container.h"
#include "api/checkpoint/folder_lock.h"
#include "api/checkpoint/pickle_writer.h"
#include "api/checkpoint/saved_files.h"
#include "api/checkpoint/sharded_input.h"
#include "api/parallel/shards.h"

namespace torchfuse {

namespace {

using checkpoint::Dict;
using checkpoint::List;
using checkpoint::Ranks;

constexpr const char* kSaveSharded = "save_sharded_checkpoint";
constexpr const char* kLoadSharded = "load_sharded_checkpoint";

std::string without_slashes(std::string folder) {
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder;
}

void make_folder(const std::string& folder) {
  TORCH_CHECK_VALUE(!folder.empty(), kSaveSharded,
                    ": expected folder to name one, got an empty name.");
  int error = ::mkdir(folder.c_str(), 0777) == 0 ? 0 : errno;
  if (error == 0) {
    error = checkpoint::sync_folder(folder);
  } else {
    struct stat found{};
    const bool is_there = ::stat(folder.c_str(), &found) == 0;
    if (is_there && S_ISDIR(found.st_mode)) return;
    TORCH_CHECK_VALUE(error != EEXIST, kSaveSharded, ": expected ", folder,
                      " to be a folder or a new name, got ",
                      is_there ? "a file" : "a symbolic link to nothing", ". Name a folder.");
  }
  TORCH_CHECK(error == 0, kSaveSharded, ": could not make the folder ", folder, ": ",
              std::generic_category().message(error),
              ". Name one in a folder that exists and may be written.");
}

/// Writes this rank's file. Returns pairs of name and bytes of all ranks' files.
List write_files(const Ranks& ranks, const std::string& folder, const std::string& tag,
                 const Dict& own) {
  const std::string path = folder + "/" + checkpoint::file_name(ranks.rank(), tag);
  std::int64_t bytes = 0;
  try {
    ranks.all_or_none([&] {
      checkpoint::write_container(path, own, kSaveSharded);
      const auto found = checkpoint::bytes_of(path);
      TORCH_CHECK_VALUE(found, kSaveSharded, ": expected ", path,
                        " to be the file that was written, got none. Let no other program save "
                        "there.");
      bytes = *found;
    });
  } catch (const std::exception&) {
    ::unlink(path.c_str());
    throw;
  }
  List files = checkpoint::make_list();
  for (const std::string& each : ranks.gather(std::to_string(bytes))) {
    const auto rank = static_cast<std::int64_t>(files.size());
    files.push_back(c10::ivalue::Tuple::create(
        {checkpoint::file_name(rank, tag), static_cast<std::int64_t>(std::stoll(each))}));
  }
  return files;
}

/// Rank 0 may see another folder than a rank that has written into it, and another save may have
/// removed its files.
void check_files(const std::string& folder, const List& files) {
  for (const c10::IValue& each : files) {
    const auto& pair = each.toTupleRef().elements();
    const std::string path = folder + "/" + pair[0].toStringRef();
    const auto bytes = checkpoint::bytes_of(path);
    TORCH_CHECK_VALUE(bytes == pair[1].toInt(), kSaveSharded, ": expected ", path,
                      " to be the file of ", pair[1].toInt(), " bytes that its rank wrote, got ",
                      bytes ? std::to_string(*bytes) + " bytes" : "none",
                      ". All ranks must see the same folder, and no other program save there.");
  }
}

void remove_files(const std::string& folder, const List& files) {
  for (const c10::IValue& each : files) {
    ::unlink((folder + "/" + each.toTupleRef().elements()[0].toStringRef()).c_str());
  }
}

/// Replaces the index, or removes the files that it would have named: they may fill the disk.
void replace_index(const std::string& folder, const List& files, const Dict& index) {
  const std::string path = checkpoint::index_of(folder);
  const auto before = checkpoint::identity_of(path);
  try {
    check_files(folder, files);
    checkpoint::write_container(path, index, kSaveSharded, checkpoint::Link::kReplace);
  } catch (const std::exception&) {
    // An index that is in its place, and perhaps not on the disk, needs them.
    if (checkpoint::identity_of(path) == before) remove_files(folder, files);
    throw;
  }
}

/// The other ranks wait for rank 0 while it waits for the lock.
std::chrono::milliseconds longest_wait(const Ranks& ranks) {
  const std::chrono::milliseconds longest = std::chrono::seconds(10);
  const auto timeout = ranks.timeout();
  return timeout ? std::min(longest, *timeout / 2) : longest;
}

/// Replaces the index while no other save does, and removes what the one before named.
void replace_locked(const Ranks& ranks, const std::string& folder, const std::string& tag,
                    const List& files, const Dict& index) {
  std::optional<checkpoint::FolderLock> lock;
  try {
    lock.emplace(folder, kSaveSharded, longest_wait(ranks));
  } catch (const std::exception&) {
    remove_files(folder, files);
    throw;
  }
  const checkpoint::OldFiles old_files(folder);
  replace_index(folder, files, index);
  old_files.remove(tag);
}

/// A save may replace the index between the reads of two ranks.
void check_one_save(const Ranks& ranks, const std::string& folder, const std::string& save) {
  const auto saves = ranks.gather(save);
  ranks.all_or_none([&] {
    TORCH_CHECK_VALUE(save == saves.front(), kLoadSharded, ": expected ",
                      checkpoint::index_of(folder),
                      " to be of one save in all ranks, got another in rank ", ranks.rank(),
                      " than in rank 0: it was replaced meanwhile, or the ranks see other folders. "
                      "Load it again.");
  });
}

}  // namespace

Checkpoint::Saved Checkpoint::save_places(const Ranks& ranks, Dict& own) const {
  std::map<std::string, Dict> of_parts;
  ranks.all_or_none([&] {
    for (const auto& [name, split] : split_) {
      TORCH_CHECK_VALUE(
          split.shards->size() == ranks.size() && split.shards->rank() == ranks.rank(),
          kSaveSharded, ": expected the group of the ", split.shards->size(),
          " processes that share the states of '", name, "', got one of ", ranks.size(),
          ", or in another order. Call group(group) with the optimizer's.");
      of_parts.emplace(name, split.shards->its_class().state_dict(*split.optimizer));
    }
  });
  Saved saved;
  for (const auto& [name, state] : of_parts) {
    Dict parts = checkpoint::make_dict();
    saved[name] = split_.at(name).shards->placed_state(state, parts);
    own.insert_or_assign(name, parts);
  }
  return saved;
}

void save_sharded_checkpoint(const std::string& path, const Checkpoint& description) {
  const at::NoGradGuard no_grad;
  const Ranks ranks(description.group_, kSaveSharded);
  const std::string folder = without_slashes(path);
  Dict own = checkpoint::make_dict();
  Checkpoint::Saved saved = description.save_places(ranks, own);
  description.save_generators(ranks, saved);
  Dict contents = checkpoint::make_dict();
  ranks.all_or_none([&] {
    if (ranks.rank() != 0) return;
    contents = description.contents(kSaveSharded, saved);
    // Values that cannot be saved are refused before anything is written.
    checkpoint::to_pickle(contents, std::string(kSaveSharded) + ": expected the checkpoint");
    make_folder(folder);
  });
  const std::string tag = ranks.gather(checkpoint::random_digits()).front();
  const List files = write_files(ranks, folder, tag, own);
  ranks.all_or_none([&] {
    if (ranks.rank() != 0) return;
    List optimizers = checkpoint::make_list();
    for (const auto& entry : own) optimizers.push_back(entry.key());
    Dict sharded = checkpoint::make_dict();
    sharded.insert_or_assign("format", checkpoint::kShardedFormat);
    sharded.insert_or_assign("files", files);
    sharded.insert_or_assign("optimizers", optimizers);
    Dict index = checkpoint::make_dict();
    index.insert_or_assign("sharded", sharded);
    index.insert_or_assign("checkpoint", contents);
    replace_locked(ranks, folder, tag, files, index);
  });
}

CheckpointValues load_sharded_checkpoint(const std::string& path, const Checkpoint& description) {
  const at::NoGradGuard no_grad;
  const Ranks ranks(description.group_, kLoadSharded);
  const std::string folder = without_slashes(path);
  std::optional<checkpoint::ShardedInput> input;
  ranks.all_or_none([&] { input.emplace(folder, kLoadSharded); });
  check_one_save(ranks, folder, input->save());
  const auto prepare = [&](const std::string& name, const CheckpointPart& part,
                           const c10::IValue& saved) -> std::function<void()> {
    const auto split = description.split_.find(name);
    if (split != description.split_.end()) {
      const auto& [optimizer, shards] = split->second;
      return shards->its_class().prepare_state_dict(*optimizer,
                                                    input->own_state(name, saved, *shards));
    }
    return part.prepare(input->has(name) ? input->whole_state(name, saved) : saved);
  };
  const auto contents = [&] { return input->contents(); };
  return description.load(checkpoint::index_of(folder), ranks, contents, prepare);
}

}  // namespace torchfuse
