// SPDX-License-Identifier: BSD-3-Clause
// What a DistributedDataParallel has beside its module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torchfuse/parallel/distributed_data_parallel.h>

#include <memory>
#include <vector>

#include "api/parallel/collectives.h"
#include "api/parallel/reducer.h"

namespace torchfuse::parallel {

struct DataParallelBase::Replica {
  Replica(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
          DistributedDataParallelOptions options);

  /// From now on gradients go to these parts, and no more to the parameters.
  void give_parts_to(std::shared_ptr<GradientParts> parts);

  Collectives collectives;
  DistributedDataParallelOptions options;
  std::vector<at::Tensor> buffers;  ///< that each forward broadcasts
  std::vector<at::Tensor> all_buffers;
  std::shared_ptr<bool> sync = std::make_shared<bool>(true);
  std::shared_ptr<Reducer> reducer;
};

}  // namespace torchfuse::parallel
