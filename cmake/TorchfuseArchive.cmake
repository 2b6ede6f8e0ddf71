# SPDX-License-Identifier: BSD-3-Clause
# `cpack`, or the target `package`, packs the files that `cmake --install` installs into a relocatable
# archive. The archive's name contains torch's minor version and CUDA's major version.

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
