// SPDX-License-Identifier: BSD-3-Clause
// Note [Gloo without its headers]
// torch exports ProcessGroupGloo but does not ship Gloo's headers, which ProcessGroupGloo.hpp
// includes. The class only stores pointers to Gloo's types, so the declarations in
// gloo_declarations/gloo are enough. Only this file includes them. The functions that it calls are
// compiled into torch.
#define USE_C10D_GLOO
#include <ATen/Context.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "api/message_of.h"
#include "api/parallel/rendezvous.h"

namespace torchfuse::parallel {

void add_gloo(c10d::ProcessGroup& group, const BackendArguments& arguments) {
  using Gloo = c10d::ProcessGroupGloo;
  try {
    const auto options = Gloo::Options::create_default(arguments.timeout);
    options->group_name = arguments.name;
    const auto backend =
        c10::make_intrusive<Gloo>(c10::make_intrusive<c10d::PrefixStore>("gloo", arguments.store),
                                  static_cast<int>(arguments.self.rank),
                                  static_cast<int>(arguments.self.world_size), options);
    group.setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, backend);
    // Gloo also supports GPU tensors, by copying through the host.
    if (at::hasCUDA()) group.setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::GLOO, backend);
    group.setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, kInit, ": expected Gloo to connect the ", arguments.self.world_size,
                " processes of group '", arguments.name, "' within ", to_string(arguments.timeout),
                ", got: ", clause_of(error),
                ". Check that the machines reach each other; GLOO_SOCKET_IFNAME names the network "
                "interface.");
  }
}

}  // namespace torchfuse::parallel
