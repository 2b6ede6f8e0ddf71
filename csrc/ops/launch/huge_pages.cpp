// SPDX-License-Identifier: BSD-3-Clause
#include "ops/launch/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>

namespace torchfuse::ops {

void request_huge_pages(const at::Tensor& tensor) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kPage = 4096;
  constexpr std::size_t kWorthHugePages = std::size_t{4} << 20;
  if (!tensor.is_cpu() || tensor.nbytes() < kWorthHugePages) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const std::uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const std::uintptr_t end = (begin + tensor.nbytes()) / kPage * kPage;
  // madvise() is only advice, so errors on systems without huge pages are ignored.
  static_cast<void>(madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE));
#else
  static_cast<void>(tensor);
#endif
}

}  // namespace torchfuse::ops
