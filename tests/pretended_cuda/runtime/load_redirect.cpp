// SPDX-License-Identifier: BSD-3-Clause
// ATen's CUDA ops have kernels in machine code that nothing here can run: before a program's first
// use of a device they are redirected. Python and C++ programs alike, with nothing to import or to
// link.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "device.h"

namespace pretended_cuda {

void load_redirect() {
  static std::atomic<bool> begun = false;
  if (begun) return;
  void* const torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return;  // a program without torch, or it comes later
  dlclose(torch);
  if (begun.exchange(true)) return;
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&load_redirect), &self);
  const std::string path = self.dli_fname;
  const std::string redirect = path.substr(0, path.rfind('/') + 1) + "libpretended_cuda_aten.so";
  const char* why = nullptr;
  if (void* const library = dlopen(redirect.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    const auto begin =
        reinterpret_cast<const char* (*)()>(dlsym(library, "pretended_cuda_redirect"));
    why = begin != nullptr ? begin() : dlerror();
  } else {
    why = dlerror();
  }
  if (why == nullptr) return;
  std::fprintf(stderr, "pretended CUDA: the redirected ATen ops cannot be used: %s.\n", why);
  std::_Exit(2);
}

}  // namespace pretended_cuda
