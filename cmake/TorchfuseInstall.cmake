# SPDX-License-Identifier: BSD-3-Clause
# Installs the library, the headers, and the CMake package for find_package().
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/torchfuse")
set(TORCHFUSE_BUILT_TORCH_ROOT "")
if(NOT TORCHFUSE_RELOCATABLE)
  set(TORCHFUSE_BUILT_TORCH_ROOT "${TORCHFUSE_TORCH_ROOT}")
endif()
set(TORCHFUSE_SHARES_KERNELS OFF)
if(TORCHFUSE_KERNELS_LIBRARY)
  set(TORCHFUSE_SHARES_KERNELS ON)
endif()
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/torchfuseConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/torchfuseConfig.cmake"
  INSTALL_DESTINATION "${package_dir}"
  NO_SET_AND_CHECK_MACRO
)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/torchfuseConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion
)
set(libraries torchfuse)
if(NOT TORCHFUSE_KERNELS_LIBRARY)
  list(APPEND libraries torchfuse_kernels_library)
endif()
install(TARGETS ${libraries} EXPORT torchfuseTargets FILE_SET HEADERS)
install(EXPORT torchfuseTargets NAMESPACE torchfuse:: DESTINATION "${package_dir}")
install(
  FILES
    "${PROJECT_BINARY_DIR}/torchfuseConfig.cmake"
    "${PROJECT_BINARY_DIR}/torchfuseConfigVersion.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/FindTorchfuseTorch.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/TorchfuseLocateTorch.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/torch_search_path.py"
  DESTINATION "${package_dir}"
)
# A wheel already contains the license in its metadata.
if(NOT TORCHFUSE_BUILD_PYTHON)
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
endif()

# Records versions and options of the build. Python reads build_info.json before loading the library.
# Only `cmake --install --component python` installs this file, into the Python package.
set(architectures "")
set(built_with_cuda "")
if(TORCHFUSE_CUDA)
  list(JOIN CMAKE_CUDA_ARCHITECTURES "," architectures)
  set(built_with_cuda "${TORCHFUSE_NVCC_VERSION}")
endif()
list(JOIN TORCHFUSE_CPU_LEVELS ", " cpu_levels)
file(
  GENERATE OUTPUT "${PROJECT_BINARY_DIR}/build_info.json"
  CONTENT
    "{
  \"torchfuse\": \"${PROJECT_VERSION}\",
  \"torch\": \"${TORCHFUSE_TORCH_VERSION}\",
  \"cuda\": \"${built_with_cuda}\",
  \"cuda_architectures\": \"${architectures}\",
  \"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\",
  \"cpu_levels\": \"${cpu_levels}\",
  \"build_type\": \"$<CONFIG>\"
}
"
)
install(
  FILES "${PROJECT_BINARY_DIR}/build_info.json"
  DESTINATION .
  COMPONENT python
  EXCLUDE_FROM_ALL
)
