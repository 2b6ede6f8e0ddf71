# SPDX-License-Identifier: BSD-3-Clause
# add_subdirectory(torchfuse), and what it may leave in the project around it: its own names.

get_cmake_property(names_before CACHE_VARIABLES)
set(build_type_before "$CACHE{CMAKE_BUILD_TYPE}")
add_subdirectory("${CONSUMER_TORCHFUSE_SOURCE}" torchfuse)

get_cmake_property(names CACHE_VARIABLES)
list(REMOVE_ITEM names ${names_before})
list(FILTER names EXCLUDE REGEX "^(TORCHFUSE_|torchfuse_)")
# What find_package and GenerateExportHeader remember about reports and checks of their own.
list(FILTER names EXCLUDE REGEX "^(FIND_PACKAGE_MESSAGE_DETAILS_TorchfuseTorch|COMPILER_HAS_.*)$")
if(names)
  message(FATAL_ERROR "expected torchfuse to cache variables of its own prefix only, got ${names}")
endif()
if(NOT build_type_before STREQUAL "$CACHE{CMAKE_BUILD_TYPE}")
  message(
    FATAL_ERROR
    "expected torchfuse to leave CMAKE_BUILD_TYPE='${build_type_before}' as it was, got "
    "'$CACHE{CMAKE_BUILD_TYPE}'"
  )
endif()
