# SPDX-License-Identifier: BSD-3-Clause
# Creates imported targets from torch's files:
#   torchfuse::torch         for programs to link: headers and all libraries below
#   torchfuse::torch_cpu, c10, torch_cuda, c10_cuda, torch_python   one per library, if it exists
#   torchfuse::libgomp       the OpenMP runtime that torch uses
# The names differ from torch's target names, so a program may call find_package(Torch) too.
cmake_policy(VERSION 3.25)

include("${CMAKE_CURRENT_LIST_DIR}/TorchfuseLocateTorch.cmake")
if(NOT TORCHFUSE_TORCH_ROOT)
  torchfuse_locate_torch()
endif()

function(_torchfuse_import_torch_library name path)
  if(EXISTS "${path}" AND NOT TARGET torchfuse::${name})
    add_library(torchfuse::${name} SHARED IMPORTED)
    set_target_properties(
      torchfuse::${name}
      PROPERTIES IMPORTED_LOCATION "${path}" INTERFACE_LINK_LIBRARIES torchfuse::torch_headers
    )
  endif()
endfunction()

function(_torchfuse_import_torch root)
  if(NOT TARGET torchfuse::torch_headers)
    add_library(torchfuse::torch_headers INTERFACE IMPORTED)
    set_target_properties(
      torchfuse::torch_headers
      PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
        INTERFACE_COMPILE_FEATURES cxx_std_20
    )
  endif()
  # The file name differs between wheels: libgomp.so.1 or libgomp-<hash>.so.1.
  file(GLOB gomp "${root}/lib/libgomp*.so*")
  set(needed "")
  if(gomp)
    list(GET gomp 0 gomp)
    _torchfuse_import_torch_library(libgomp "${gomp}")
    list(APPEND needed "\"${gomp}\"")
  endif()
  foreach(
    name
    c10
    torch_cpu
    c10_cuda
    torch_cuda
    torch
    torch_python
  )
    set(path "${root}/lib/lib${name}.so")
    if(name STREQUAL "torch")
      list(APPEND needed "\"${path}\"")
      continue()
    endif()
    _torchfuse_import_torch_library(${name} "${path}")
    if(EXISTS "${path}" AND NOT name STREQUAL "torch_python")
      list(APPEND needed "\"${path}\"")
    endif()
  endforeach()
  if(TARGET torchfuse::torch)
    return()
  endif()
  # libtorch and libtorch_cuda register kernels when they are loaded. Programs use no symbols of these
  # libraries, so the linker would drop them without --no-as-needed. All libraries are listed, so that a
  # program finds each library through the program's run path, wherever libtorchfuse is installed.
  # Without libgomp in the list, the system's libgomp might be loaded. Linking the targets as well adds
  # the run path.
  string(REPLACE ";" "," needed "${needed}")
  add_library(torchfuse::torch INTERFACE IMPORTED)
  set(libraries torchfuse::torch_headers torchfuse::torch_cpu torchfuse::c10)
  if(TARGET torchfuse::torch_cuda)
    list(APPEND libraries torchfuse::torch_cuda torchfuse::c10_cuda)
  endif()
  set_target_properties(
    torchfuse::torch
    PROPERTIES
      INTERFACE_LINK_LIBRARIES "-Wl,--push-state,--no-as-needed,${needed},--pop-state;${libraries}"
  )
endfunction()

if(TORCHFUSE_TORCH_ROOT)
  _torchfuse_import_torch("${TORCHFUSE_TORCH_ROOT}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  TorchfuseTorch
  REQUIRED_VARS TORCHFUSE_TORCH_ROOT
  VERSION_VAR TORCHFUSE_TORCH_VERSION
  REASON_FAILURE_MESSAGE "set TORCHFUSE_TORCH_DIR to the folder of torch"
)
