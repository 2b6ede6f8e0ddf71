# SPDX-License-Identifier: BSD-3-Clause
# find_package(torchfuse) in a wheel for several torches: includes the package for the torch that is found.
cmake_policy(VERSION 3.25)

get_filename_component(_torchfuse_package "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(TORCHFUSE_TORCH_HINTS "${_torchfuse_package}/../torch")
include("${CMAKE_CURRENT_LIST_DIR}/TorchfuseLocateTorch.cmake")
torchfuse_locate_torch()
unset(torchfuse_NOT_FOUND_MESSAGE)
string(REGEX MATCH "^[0-9]+" _torchfuse_cuda "${TORCHFUSE_TORCH_CUDA_VERSION}")

set(torchfuse_FOUND FALSE)
set(_torchfuse_shim "${_torchfuse_package}/shims/torch${TORCHFUSE_TORCH_MINOR}")
if(NOT TORCHFUSE_TORCH_ROOT)
  set(
    torchfuse_NOT_FOUND_MESSAGE
    "torchfuse needs torch, and none was found: set TORCHFUSE_TORCH_DIR to its folder."
  )
elseif(EXISTS "${_torchfuse_shim}-cu${_torchfuse_cuda}")
  set(_torchfuse_shim "${_torchfuse_shim}-cu${_torchfuse_cuda}")
elseif(EXISTS "${_torchfuse_shim}-cpu")
  set(_torchfuse_shim "${_torchfuse_shim}-cpu")
  if(_torchfuse_cuda AND NOT torchfuse_FIND_QUIETLY)
    message(
      WARNING
      "torchfuse has no kernels for CUDA ${TORCHFUSE_TORCH_CUDA_VERSION}, which the torch in "
      "${TORCHFUSE_TORCH_ROOT} uses: torchfuse will run on the CPU. Build torchfuse from source."
    )
  endif()
else()
  file(GLOB _torchfuse_known RELATIVE "${_torchfuse_package}/shims" "${_torchfuse_package}/shims/*")
  list(JOIN _torchfuse_known ", " _torchfuse_known)
  set(
    torchfuse_NOT_FOUND_MESSAGE
    "torchfuse was built for ${_torchfuse_known}, and the torch in ${TORCHFUSE_TORCH_ROOT} is ${TORCHFUSE_TORCH_VERSION}: set TORCHFUSE_TORCH_DIR to a supported torch, or build torchfuse from source."
  )
endif()
if(NOT torchfuse_NOT_FOUND_MESSAGE)
  set(TORCHFUSE_TORCH_DIR "${TORCHFUSE_TORCH_ROOT}")
  include("${_torchfuse_shim}/lib/cmake/torchfuse/torchfuseConfig.cmake")
endif()
