# SPDX-License-Identifier: BSD-3-Clause
# Finds torch and reads its version from files, without creating targets or searching for CUDA. This
# file is installed with torchfuse's CMake package, because users need the same torch.
cmake_policy(VERSION 3.25)

set(_TORCHFUSE_CMAKE_DIR "${CMAKE_CURRENT_LIST_DIR}")

# A torch without headers cannot be used for building.
function(_torchfuse_holds_torch out folder)
  if(EXISTS "${folder}/lib/libtorch_cpu.so" AND EXISTS "${folder}/include/torch/library.h")
    set(${out} TRUE PARENT_SCOPE)
  else()
    set(${out} FALSE PARENT_SCOPE)
  endif()
endfunction()

# Lists folders that may contain torch, best first. If TORCHFUSE_TORCH_DIR is set in CMake or in the
# environment, lists that folder only. Otherwise lists the hints and the Python environments.
function(_torchfuse_torch_candidates out)
  if(NOT TORCHFUSE_TORCH_DIR AND DEFINED ENV{TORCHFUSE_TORCH_DIR})
    file(TO_CMAKE_PATH "$ENV{TORCHFUSE_TORCH_DIR}" TORCHFUSE_TORCH_DIR)
    set(TORCHFUSE_TORCH_DIR "${TORCHFUSE_TORCH_DIR}" PARENT_SCOPE)
  endif()
  if(TORCHFUSE_TORCH_DIR)
    set(${out} "${TORCHFUSE_TORCH_DIR}" PARENT_SCOPE)
    return()
  endif()
  # If a hint contains torch, a C++ project does not need Python.
  foreach(hint IN LISTS TORCHFUSE_TORCH_HINTS)
    _torchfuse_holds_torch(found "${hint}")
    if(found)
      set(${out} "${hint}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(candidates "")
  if(NOT Python_EXECUTABLE)
    find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  endif()
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" "${_TORCHFUSE_CMAKE_DIR}/torch_search_path.py"
      OUTPUT_VARIABLE found
      OUTPUT_STRIP_TRAILING_WHITESPACE
      COMMAND_ERROR_IS_FATAL ANY
    )
    string(REPLACE "\n" ";" found "${found}")
    list(APPEND candidates ${found})
  endif()
  set(${out} "${candidates}" PARENT_SCOPE)
endfunction()

# Reads version.py (Python package) or build-version (unpacked LibTorch).
function(_torchfuse_read_torch_version root)
  set(version "")
  set(cuda "")
  if(EXISTS "${root}/version.py")
    file(READ "${root}/version.py" text)
    if(text MATCHES "__version__ = '([^']+)'")
      set(version "${CMAKE_MATCH_1}")
    endif()
    if(text MATCHES "cuda[^=\n]*= '([0-9.]+)'")
      set(cuda "${CMAKE_MATCH_1}")
    endif()
  elseif(EXISTS "${root}/build-version")
    file(READ "${root}/build-version" version)
    string(STRIP "${version}" version)
    if(version MATCHES "\\+cu([0-9]+)([0-9])$")
      set(cuda "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
    endif()
  endif()
  set(TORCHFUSE_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(TORCHFUSE_TORCH_CUDA_VERSION "${cuda}" PARENT_SCOPE)
endfunction()

# Sets TORCHFUSE_TORCH_ROOT, TORCHFUSE_TORCH_VERSION ("2.11.0+cu130"), TORCHFUSE_TORCH_MINOR ("2.11")
# and TORCHFUSE_TORCH_CUDA_VERSION ("13.0", empty for a CPU build). If no torch is found, the root is
# empty; with REQUIRED, this is an error.
function(torchfuse_locate_torch)
  _torchfuse_torch_candidates(candidates)
  set(root "")
  foreach(candidate IN LISTS candidates)
    _torchfuse_holds_torch(found "${candidate}")
    if(found)
      get_filename_component(root "${candidate}" REALPATH)
      break()
    endif()
  endforeach()
  if(root)
    _torchfuse_read_torch_version("${root}")
    if(NOT TORCHFUSE_TORCH_VERSION MATCHES "^([0-9]+\\.[0-9]+)")
      message(FATAL_ERROR "torchfuse: could not read the version of the torch in ${root}.")
    endif()
    set(TORCHFUSE_TORCH_MINOR "${CMAKE_MATCH_1}" PARENT_SCOPE)
    set(TORCHFUSE_TORCH_VERSION "${TORCHFUSE_TORCH_VERSION}" PARENT_SCOPE)
    set(TORCHFUSE_TORCH_CUDA_VERSION "${TORCHFUSE_TORCH_CUDA_VERSION}" PARENT_SCOPE)
  elseif("REQUIRED" IN_LIST ARGV)
    if(TORCHFUSE_TORCH_DIR)
      set(where "in TORCHFUSE_TORCH_DIR=${TORCHFUSE_TORCH_DIR}")
    else()
      set(where "in the environments of '${Python_EXECUTABLE}'")
    endif()
    message(
      FATAL_ERROR
      "torchfuse: no torch was found ${where}: install torch first. If torch is installed already, set "
      "TORCHFUSE_TORCH_DIR to its folder, or pass --no-build-isolation to pip."
    )
  endif()
  set(TORCHFUSE_TORCH_ROOT "${root}" PARENT_SCOPE)
endfunction()
