# SPDX-License-Identifier: BSD-3-Clause
# `cpack`, or the target `package`: what `cmake --install` installs as one archive, to be unpacked
# anywhere. Its name says what it must be used with: the minor version of torch and CUDA's major one.

set(platform cpu)
if(TORCHFUSE_CUDA)
  set(platform "cu${TORCHFUSE_CUDA_MAJOR}")
endif()
set(CPACK_GENERATOR TGZ)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_PACKAGE_VENDOR "the torchfuse authors")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
string(
  CONCAT CPACK_PACKAGE_FILE_NAME
  "torchfuse-${PROJECT_VERSION}-torch${TORCHFUSE_TORCH_MINOR}-${platform}-linux-${CMAKE_SYSTEM_PROCESSOR}"
)
include(CPack)
