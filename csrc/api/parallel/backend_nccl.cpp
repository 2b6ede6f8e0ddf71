// SPDX-License-Identifier: BSD-3-Clause
#include <c10/util/Exception.h>

#include "api/parallel/rendezvous.h"

#ifdef TORCHFUSE_WITH_NCCL
#define USE_C10D_NCCL
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace torchfuse::parallel {

#ifdef TORCHFUSE_WITH_NCCL

bool has_nccl() { return true; }

void add_nccl(c10d::ProcessGroup& group, const BackendArguments& arguments) {
  using Nccl = c10d::ProcessGroupNCCL;
  const auto devices = static_cast<std::int64_t>(c10::cuda::device_count());
  TORCH_CHECK(arguments.self.local_rank < devices, kInit, ": expected a GPU for local rank ",
              arguments.self.local_rank, ", got ", devices,
              " on this machine. Start at most one process for each GPU, or use the gloo backend.");
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(arguments.self.local_rank));
  const auto options = Nccl::Options::create();
  options->timeout = arguments.timeout;
  options->group_name = arguments.name;
  const auto backend = c10::make_intrusive<Nccl>(
      c10::make_intrusive<c10d::PrefixStore>("nccl", arguments.store),
      static_cast<int>(arguments.self.rank), static_cast<int>(arguments.self.world_size), options);
  group.setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::NCCL, backend);
  group.setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
}

#else

bool has_nccl() { return false; }

void add_nccl(c10d::ProcessGroup&, const BackendArguments&) {
  TORCH_INTERNAL_ASSERT(false, "has_nccl() is false");
}

#endif

}  // namespace torchfuse::parallel
