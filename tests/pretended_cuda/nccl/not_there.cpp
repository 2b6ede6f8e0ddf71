// SPDX-License-Identifier: BSD-3-Clause
// Functions of libnccl.so.2 that torch names and that are not there. Without nccl.h, for it would
// want all their parameters.

namespace pretended_nccl {

int refuse(const char* function);  // nccl.cpp

}  // namespace pretended_nccl

#define PRETENDED_NCCL_NOT_THERE(function) \
  extern "C" int function() { return pretended_nccl::refuse(#function); }

PRETENDED_NCCL_NOT_THERE(ncclCommDeregister)
PRETENDED_NCCL_NOT_THERE(ncclCommInitAll)
PRETENDED_NCCL_NOT_THERE(ncclCommInitRankScalable)
PRETENDED_NCCL_NOT_THERE(ncclCommRegister)
PRETENDED_NCCL_NOT_THERE(ncclCommShrink)
PRETENDED_NCCL_NOT_THERE(ncclCommWindowDeregister)
PRETENDED_NCCL_NOT_THERE(ncclCommWindowRegister)
PRETENDED_NCCL_NOT_THERE(ncclDevCommCreate)
PRETENDED_NCCL_NOT_THERE(ncclDevCommDestroy)
PRETENDED_NCCL_NOT_THERE(ncclGroupSimulateEnd)
PRETENDED_NCCL_NOT_THERE(ncclMemAlloc)
PRETENDED_NCCL_NOT_THERE(ncclMemFree)
PRETENDED_NCCL_NOT_THERE(ncclRedOpCreatePreMulSum)
PRETENDED_NCCL_NOT_THERE(ncclRedOpDestroy)
