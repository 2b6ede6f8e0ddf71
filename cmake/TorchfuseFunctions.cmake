# SPDX-License-Identifier: BSD-3-Clause
# The verbs of the manifest, and what every target of ours has in common.

set(TORCHFUSE_KERNELS "")
set(TORCHFUSE_SIMD_KERNELS "")
set(TORCHFUSE_OPS "")
set(TORCHFUSE_OPTIMIZERS "")
set(TORCHFUSE_FUNCTORS "")
set(TORCHFUSE_LAYERWISE "")
set(TORCHFUSE_OPTIMIZER_CLASSES "")

function(_torchfuse_expect_files verb)
  foreach(file IN LISTS ARGN)
    if(NOT EXISTS "${PROJECT_SOURCE_DIR}/csrc/${file}")
      message(
        FATAL_ERROR
        "${verb}: expected the file csrc/${file} to exist. Write it, or correct the name in "
        "cmake/TorchfuseOps.cmake."
      )
    endif()
  endforeach()
endfunction()

# A kernel without an op of its own. SIMD: one object per instruction level.
function(torchfuse_add_kernel name)
  _torchfuse_expect_files(
    "torchfuse_add_kernel(${name})"
    kernels/${name}.h
    kernels/cpu/${name}_cpu.cpp
    kernels/cuda/${name}_cuda.cu
  )
  if("${ARGN}" STREQUAL "SIMD")
    set(TORCHFUSE_SIMD_KERNELS ${TORCHFUSE_SIMD_KERNELS} ${name} PARENT_SCOPE)
  else()
    set(TORCHFUSE_KERNELS ${TORCHFUSE_KERNELS} ${name} PARENT_SCOPE)
  endif()
endfunction()

# A kernel and the op that calls it, whose name is the last part of `path`. A macro, so that the record
# reaches the caller's scope.
macro(torchfuse_add_op path)
  get_filename_component(_torchfuse_name "${path}" NAME)
  torchfuse_add_kernel(${_torchfuse_name} ${ARGN})
  _torchfuse_expect_files("torchfuse_add_op(${path})" ops/${path}.cpp)
  list(APPEND TORCHFUSE_OPS ${path})
endmacro()

# An optimizer: one functor for all backends. LAYERWISE: its update needs norms of whole tensors.
# CPP_CLASS: it also has a C++ class.
macro(torchfuse_add_fused_optimizer name functor)
  set(_torchfuse_verb "torchfuse_add_fused_optimizer(${name} ${functor})")
  cmake_parse_arguments(_torchfuse "LAYERWISE;CPP_CLASS" "" "" ${ARGN})
  if(_torchfuse_UNPARSED_ARGUMENTS)
    message(
      FATAL_ERROR
      "${_torchfuse_verb}: expected LAYERWISE, CPP_CLASS or nothing more, got "
      "${_torchfuse_UNPARSED_ARGUMENTS}."
    )
  endif()
  _torchfuse_expect_files("${_torchfuse_verb}" kernels/functors/${name}.h)
  list(APPEND TORCHFUSE_OPTIMIZERS ${name})
  list(APPEND TORCHFUSE_FUNCTORS ${functor})
  if(_torchfuse_LAYERWISE)
    list(APPEND TORCHFUSE_LAYERWISE ${name})
  endif()
  if(_torchfuse_CPP_CLASS)
    _torchfuse_expect_files(
      "${_torchfuse_verb} with CPP_CLASS"
      include/torchfuse/optim/fused_${name}.h
      api/optim/fused_${name}.cpp
    )
    list(APPEND TORCHFUSE_OPTIMIZER_CLASSES fused_${name})
  endif()
endmacro()

# Writes the op of an optimizer, and the C++ function that calls it as it is declared in ops.h.
function(torchfuse_generate_fused_op NAME FUNCTOR source)
  file(READ "${PROJECT_SOURCE_DIR}/csrc/include/torchfuse/ops.h" declarations)
  if(NOT declarations MATCHES "TORCHFUSE_API void fused_${NAME}_\\(([^()]*)\\);")
    message(
      FATAL_ERROR
      "torchfuse_add_fused_optimizer(${NAME} ${FUNCTOR}): expected csrc/include/torchfuse/ops.h to declare "
      "void fused_${NAME}_(...), got no such function. Declare it, or correct the name in "
      "cmake/TorchfuseOps.cmake."
    )
  endif()
  string(REGEX REPLACE " = [^,]*" "" PARAMETERS "${CMAKE_MATCH_1}")
  string(REGEX REPLACE "[^,]* ([a-z0-9_]+)(,|$)" "\\1\\2 " ARGUMENTS "${PARAMETERS}")
  string(STRIP "${ARGUMENTS}" ARGUMENTS)
  configure_file("${PROJECT_SOURCE_DIR}/csrc/ops/fused_step/fused_op.cpp.in" "${source}" @ONLY)
endfunction()

# Language level, visibility, warnings and sanitizers: the same for every target of ours.
function(torchfuse_set_defaults target)
  set_target_properties(
    ${target}
    PROPERTIES
      CXX_STANDARD 20
      CXX_STANDARD_REQUIRED ON
      CXX_EXTENSIONS OFF
      CUDA_STANDARD 20
      CUDA_STANDARD_REQUIRED ON
      CUDA_EXTENSIONS OFF
      CXX_VISIBILITY_PRESET hidden
      CUDA_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
      POSITION_INDEPENDENT_CODE ON
  )
  target_compile_options(
    ${target}
    PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>
  )
  if(TORCHFUSE_WERROR)
    target_compile_options(
      ${target}
      PRIVATE
        $<$<COMPILE_LANGUAGE:CXX>:-Werror>
        "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>"
    )
  endif()
  if(TORCHFUSE_SANITIZE)
    set(flags -fsanitize=${TORCHFUSE_SANITIZE} -fno-omit-frame-pointer)
    if(TORCHFUSE_SANITIZE MATCHES "undefined")
      list(APPEND flags -fno-sanitize-recover=undefined)
    endif()
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${flags}>)
    target_link_options(${target} PRIVATE -fsanitize=${TORCHFUSE_SANITIZE})
  endif()
endfunction()

# A library or program that uses at::parallel_for. That header runs on one thread, silently, unless
# it is compiled with -fopenmp; the runtime that is linked must be the one that torch itself uses.
function(torchfuse_use_torch_threads target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  target_link_libraries(${target} PRIVATE torchfuse::libgomp)
endfunction()

# Compiles `size` files of the target at once. A file behind torch's headers costs seconds before its own
# first line is read: g++ instantiates anew what they left pending, even where they are precompiled. Names
# in the anonymous namespaces of one target must differ. CMAKE_UNITY_BUILD=OFF compiles each file alone.
function(torchfuse_compile_in_batches target size)
  if(NOT DEFINED CMAKE_UNITY_BUILD)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${size})
  endif()
endfunction()

# A test or a program of the tests. It spends its time in the library: optimizing the program itself takes
# longer than it saves.
function(torchfuse_set_test_defaults target)
  torchfuse_set_defaults(${target})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
endfunction()

# Every header of the target's header sets must compile when it is included alone.
# What leaves a library of kernels, named by our version: see csrc/kernels/exports.map.in.
function(torchfuse_export_kernels target)
  set(exports "${PROJECT_BINARY_DIR}/kernels.map")
  configure_file("${PROJECT_SOURCE_DIR}/csrc/kernels/exports.map.in" "${exports}" @ONLY)
  target_link_options(
    ${target}
    PRIVATE "LINKER:--version-script=${exports}" LINKER:--no-undefined LINKER:-Bsymbolic-functions
  )
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${exports}")
endfunction()

function(torchfuse_check_headers target)
  if(TORCHFUSE_BUILD_TESTS)
    set_target_properties(${target} PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)
  endif()
endfunction()

# Stops with one sentence if the compiler does not know enough of C++20.
function(torchfuse_check_compiler)
  set(too_old FALSE)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
    set(too_old TRUE)
  endif()
  if(too_old OR NOT "cxx_std_20" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
    message(
      FATAL_ERROR
      "torchfuse: expected a compiler that knows C++20, g++ 12 or newer, got ${CMAKE_CXX_COMPILER_ID} "
      "${CMAKE_CXX_COMPILER_VERSION} in ${CMAKE_CXX_COMPILER}. Set CXX to another one."
    )
  endif()
endfunction()

# Stops with one sentence if the interpreter that the module is built for is too old or does not run.
function(torchfuse_check_python)
  if(NOT Python_EXECUTABLE)
    return()
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sys; print('%d.%d' % sys.version_info[:2])"
    OUTPUT_VARIABLE version
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET
  )
  if(NOT version MATCHES "^[0-9.]+$")
    set(version "an interpreter that does not run")
  endif()
  if(NOT version VERSION_GREATER_EQUAL 3.10)
    message(
      FATAL_ERROR
      "torchfuse: expected Python 3.10 or newer, got ${version} in ${Python_EXECUTABLE}. Set "
      "Python_EXECUTABLE to another one, or use TORCHFUSE_BUILD_PYTHON=OFF."
    )
  endif()
endfunction()

# Stops with one sentence if the torch that was located is not one we are built and tested with.
function(torchfuse_check_torch_is_supported)
  if(TORCHFUSE_TORCH_MINOR VERSION_LESS 2.11 OR TORCHFUSE_TORCH_MINOR VERSION_GREATER_EQUAL 2.16)
    message(
      FATAL_ERROR
      "torchfuse: expected torch to be at least 2.11 and older than 2.16, got "
      "${TORCHFUSE_TORCH_VERSION} in ${TORCHFUSE_TORCH_ROOT}. Install another one, or set "
      "TORCHFUSE_TORCH_DIR."
    )
  endif()
  message(STATUS "torchfuse: using torch ${TORCHFUSE_TORCH_VERSION} in ${TORCHFUSE_TORCH_ROOT}")
  file(GLOB gomp "${TORCHFUSE_TORCH_ROOT}/lib/libgomp*.so*")
  if(NOT gomp)
    message(
      FATAL_ERROR
      "torchfuse: expected torch to ship its OpenMP runtime as ${TORCHFUSE_TORCH_ROOT}/lib/"
      "libgomp*.so*, got none. Use an official build of torch: with another runtime the CPU "
      "kernels would not share torch's threads."
    )
  endif()
endfunction()

# Sets `result` to a path by which all build folders that share a compiler cache find `folder`: the cache
# compares paths relative to the build folder, so this is a link in it. Without a cache it is `folder`.
# The name is short because the cache prefers the shortest of all paths that lead to a file.
function(torchfuse_same_path_for_compiler_cache result folder link)
  set(path "${folder}")
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    set(path "${CMAKE_BINARY_DIR}/.tf/${link}")
    file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/.tf")
    file(CREATE_LINK "${folder}" "${path}" SYMBOLIC)
  endif()
  set(${result} "${path}" PARENT_SCOPE)
endfunction()

# Error messages name source files; not by the paths of the machine that compiled them.
function(torchfuse_name_sources_without_folders target)
  target_compile_options(
    ${target}
    PRIVATE
      "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/="
      "-fmacro-prefix-map=${PROJECT_BINARY_DIR}/="
      "-fmacro-prefix-map=${TORCHFUSE_TORCH_ROOT}/=torch/"
  )
endfunction()
