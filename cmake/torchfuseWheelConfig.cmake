# SPDX-License-Identifier: BSD-3-Clause
# find_package(torchfuse) in a wheel for several torches: takes the package of the one that is found.
cmake_policy(VERSION 3.25)

get_filename_component(_torchfuse_package "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(TORCHFUSE_TORCH_HINTS "${_torchfuse_package}/../torch")
include("${CMAKE_CURRENT_LIST_DIR}/TorchfuseLocateTorch.cmake")
torchfuse_locate_torch()
string(REGEX MATCH "^[0-9]+" _torchfuse_cuda "${TORCHFUSE_TORCH_CUDA_VERSION}")

# Without one for its CUDA: the one for the CPU.
set(torchfuse_FOUND FALSE)
foreach(_torchfuse_kind "cu${_torchfuse_cuda}" cpu)
  set(
    _torchfuse_config
    "${_torchfuse_package}/shims/torch${TORCHFUSE_TORCH_MINOR}-${_torchfuse_kind}/lib/cmake/torchfuse/torchfuseConfig.cmake"
  )
  if(NOT torchfuse_FOUND AND TORCHFUSE_TORCH_ROOT AND EXISTS "${_torchfuse_config}")
    set(TORCHFUSE_TORCH_DIR "${TORCHFUSE_TORCH_ROOT}")
    include("${_torchfuse_config}")
  endif()
endforeach()
if(NOT torchfuse_FOUND AND NOT torchfuse_NOT_FOUND_MESSAGE)
  file(GLOB _torchfuse_known RELATIVE "${_torchfuse_package}/shims" "${_torchfuse_package}/shims/*")
  list(JOIN _torchfuse_known ", " _torchfuse_known)
  set(
    torchfuse_NOT_FOUND_MESSAGE
    "torchfuse was built for ${_torchfuse_known}, and the torch that was found is '${TORCHFUSE_TORCH_VERSION}' in '${TORCHFUSE_TORCH_ROOT}': set TORCHFUSE_TORCH_DIR to one of these, or build torchfuse from source."
  )
endif()
