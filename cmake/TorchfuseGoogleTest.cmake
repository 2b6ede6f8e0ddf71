# SPDX-License-Identifier: BSD-3-Clause
# GoogleTest, from the nearest place: a folder that is named, an installed package, the sources that
# Debian's package `googletest` installs, and only then a download.

set(_source "${TORCHFUSE_GTEST_SOURCE}")
if(NOT _source AND NOT TORCHFUSE_SANITIZE)
  find_package(GTest QUIET)
endif()
if(NOT TARGET GTest::gtest_main)
  # Under a sanitizer GoogleTest is compiled with it too, so the installed binaries do not serve.
  if(NOT _source AND EXISTS /usr/src/googletest/CMakeLists.txt)
    set(_source /usr/src/googletest)
  endif()
  set(INSTALL_GTEST OFF CACHE BOOL "Install GoogleTest" FORCE)
  set(BUILD_GMOCK OFF CACHE BOOL "Build GoogleMock" FORCE)
  include(FetchContent)
  if(_source)
    FetchContent_Declare(googletest SOURCE_DIR "${_source}")
  else()
    FetchContent_Declare(
      googletest
      GIT_REPOSITORY https://github.com/google/googletest.git
      GIT_TAG f8d7d77c06936315286eb55f8de22cd23c188571 # v1.14.0
    )
  endif()
  # The policy lets the sources' older cmake_minimum_required pass under CMake 4.
  set(CMAKE_POLICY_VERSION_MINIMUM 3.5)
  FetchContent_MakeAvailable(googletest)
  unset(CMAKE_POLICY_VERSION_MINIMUM)
  if(TORCHFUSE_SANITIZE)
    foreach(_target IN ITEMS gtest gtest_main)
      target_compile_options(${_target} PRIVATE -fsanitize=${TORCHFUSE_SANITIZE} -O0)
    endforeach()
  endif()
endif()

include(GoogleTest)

# Registers the tests of a program, each alone. Under a sanitizer a process is dear to start, and to end
# where executed lines are counted: there the program runs twice, with every second test.
function(torchfuse_discover_tests target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TEST_PREFIX" "LABELS;ENVIRONMENT")
  if(NOT TORCHFUSE_SANITIZE)
    gtest_discover_tests(
      ${target}
      TEST_PREFIX "${arg_TEST_PREFIX}"
      DISCOVERY_MODE PRE_TEST
      PROPERTIES LABELS "${arg_LABELS}" ENVIRONMENT "${arg_ENVIRONMENT}"
    )
    return()
  endif()
  foreach(half IN ITEMS 0 1)
    add_test(NAME ${target}_${half} COMMAND ${target})
    set_tests_properties(
      ${target}_${half}
      PROPERTIES
        LABELS "${arg_LABELS}"
        ENVIRONMENT "GTEST_TOTAL_SHARDS=2;GTEST_SHARD_INDEX=${half};${arg_ENVIRONMENT}"
    )
  endforeach()
endfunction()
