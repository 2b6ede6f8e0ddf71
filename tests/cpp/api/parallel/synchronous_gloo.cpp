// SPDX-License-Identifier: BSD-3-Clause
// A module for tests/python/parallel/test_backends_without_work.py: Gloo that gives no Work for a
// collective that is not asynchronous, as NCCL's backend does since torch 2.8.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <utility>
#include <vector>

namespace torchfuse::testing {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class SynchronousGloo : public c10d::Backend {
 public:
  explicit SynchronousGloo(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "synchronous_gloo"; }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    return ended(gloo_->allreduce(tensors, options), options.asyncOp);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override {
    return ended(gloo_->broadcast(tensors, options), options.asyncOp);
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& all, std::vector<at::Tensor>& own,
                    const c10d::AllgatherOptions& options) override {
    return ended(gloo_->allgather(all, own, options), options.asyncOp);
  }
  WorkPtr _allgather_base(at::Tensor& all, at::Tensor& own,
                          const c10d::AllgatherOptions& options) override {
    return ended(gloo_->_allgather_base(all, own, options), options.asyncOp);
  }
  WorkPtr scatter(std::vector<at::Tensor>& own, std::vector<std::vector<at::Tensor>>& all,
                  const c10d::ScatterOptions& options) override {
    return ended(gloo_->scatter(own, all, options), options.asyncOp);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return ended(gloo_->barrier(options), options.asyncOp);
  }

 private:
  static WorkPtr ended(WorkPtr work, bool async) {
    if (async) return work;
    work->wait();
    return {};
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

c10::intrusive_ptr<c10d::Backend> without_work(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<SynchronousGloo>(std::move(gloo));
}

}  // namespace
}  // namespace torchfuse::testing

PYBIND11_MODULE(torchfuse_synchronous_gloo, module) {
  module.def("without_work", &torchfuse::testing::without_work);
}
