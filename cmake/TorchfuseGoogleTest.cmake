# SPDX-License-Identifier: BSD-3-Clause
# Finds GoogleTest: an installed package, or sources in TORCHFUSE_GTEST_SOURCE, in Debian's package
# `googletest`, or in the pinned wheel from requirements-dev.txt. Nothing is downloaded.

# Under a sanitizer, GoogleTest must be compiled from source with the sanitizer.
if(NOT TORCHFUSE_GTEST_SOURCE AND NOT TORCHFUSE_SANITIZE)
  find_package(GTest QUIET)
endif()
if(NOT TARGET GTest::gtest_main)
  set(folders "${TORCHFUSE_GTEST_SOURCE}" "${TORCHFUSE_GTEST_SOURCE}/googletest")
  if(NOT TORCHFUSE_GTEST_SOURCE)
    set(folders /usr/src/googletest/googletest "${PROJECT_SOURCE_DIR}/.venv/src/gtest_vendor")
    if(Python_EXECUTABLE)
      cmake_path(GET Python_EXECUTABLE PARENT_PATH scripts)
      list(APPEND folders "${scripts}/../src/gtest_vendor")
    endif()
  endif()
  unset(TORCHFUSE_GTEST_FOLDER CACHE)
  find_path(
    TORCHFUSE_GTEST_FOLDER
    src/gtest-all.cc
    PATHS ${folders}
    NO_DEFAULT_PATH
    NO_CMAKE_FIND_ROOT_PATH
  )
  if(NOT TORCHFUSE_GTEST_FOLDER)
    message(
      FATAL_ERROR
      "torchfuse: expected GoogleTest for TORCHFUSE_BUILD_TESTS, got none in ${folders}. Install "
      "Debian's package libgtest-dev. Or run `pip install ros-gtest-vendor` and set "
      "TORCHFUSE_GTEST_SOURCE to the folder src/gtest_vendor in the Python environment."
    )
  endif()
  foreach(name IN ITEMS gtest gtest_main)
    add_library(${name} STATIC EXCLUDE_FROM_ALL)
    add_library(GTest::${name} ALIAS ${name})
    target_include_directories(${name} SYSTEM PUBLIC "${TORCHFUSE_GTEST_FOLDER}/include")
    target_include_directories(${name} PRIVATE "${TORCHFUSE_GTEST_FOLDER}")
    target_compile_features(${name} PUBLIC cxx_std_17)
    if(TORCHFUSE_SANITIZE)
      target_compile_options(${name} PRIVATE -fsanitize=${TORCHFUSE_SANITIZE} -O0)
    endif()
  endforeach()
  find_package(Threads REQUIRED)
  target_sources(gtest PRIVATE "${TORCHFUSE_GTEST_FOLDER}/src/gtest-all.cc")
  target_link_libraries(gtest PUBLIC Threads::Threads)
  target_sources(gtest_main PRIVATE "${TORCHFUSE_GTEST_FOLDER}/src/gtest_main.cc")
  target_link_libraries(gtest_main PUBLIC gtest)
endif()

include(GoogleTest)

# Registers each test of a program separately. Under a sanitizer, starting a process is slow, and so is
# ending a process that measures coverage. So the program runs only twice, each time with half of the
# tests.
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
