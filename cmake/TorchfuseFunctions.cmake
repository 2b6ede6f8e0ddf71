# SPDX-License-Identifier: BSD-3-Clause
# Functions for the manifest (TorchfuseOps.cmake) and common settings for all targets.

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

# Registers a kernel without an op. SIMD: the CPU file is compiled once per instruction level.
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

# Registers a kernel and the op that calls the kernel; the name is the last component of `path`. A
# macro, because the lists must change in the caller's scope.
macro(torchfuse_add_op path)
  get_filename_component(_torchfuse_name "${path}" NAME)
  torchfuse_add_kernel(${_torchfuse_name} ${ARGN})
  _torchfuse_expect_files("torchfuse_add_op(${path})" ops/${path}.cpp)
  list(APPEND TORCHFUSE_OPS ${path})
endmacro()

# Registers an optimizer, with one functor for all backends. LAYERWISE: the update needs norms over whole
# tensors. CPP_CLASS: there is also a C++ class. PASSES: the functors that have kernels, by default `functor`.
macro(torchfuse_add_fused_optimizer name functor)
  set(_torchfuse_verb "torchfuse_add_fused_optimizer(${name} ${functor})")
  cmake_parse_arguments(_torchfuse "LAYERWISE;CPP_CLASS" "" "PASSES" ${ARGN})
  if(_torchfuse_UNPARSED_ARGUMENTS)
    message(
      FATAL_ERROR
      "${_torchfuse_verb}: expected LAYERWISE, CPP_CLASS, PASSES or nothing more, got "
      "${_torchfuse_UNPARSED_ARGUMENTS}."
    )
  endif()
  _torchfuse_expect_files("${_torchfuse_verb}" kernels/functors/${name}.h)
  list(APPEND TORCHFUSE_OPTIMIZERS ${name})
  list(APPEND TORCHFUSE_FUNCTORS ${functor})
  set(TORCHFUSE_PASSES_OF_${name} ${functor})
  if(_torchfuse_PASSES)
    set(TORCHFUSE_PASSES_OF_${name} ${_torchfuse_PASSES})
  endif()
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

# Generates an optimizer's op, and the C++ function that ops.h declares for the op.
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

# Sets language level, visibility, warnings and sanitizers, for every target.
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

# For targets that use at::parallel_for. Without -fopenmp, that header silently uses one thread. The
# OpenMP runtime must be the same one that torch uses.
function(torchfuse_use_torch_threads target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  target_link_libraries(${target} PRIVATE torchfuse::libgomp)
endfunction()

# Compiles the target's files in batches of `size`. Including torch's headers costs seconds per batch,
# because g++ instantiates pending templates again, even from precompiled headers. Names in anonymous
# namespaces must be unique within the target. CMAKE_UNITY_BUILD=OFF compiles each file separately.
function(torchfuse_compile_in_batches target size)
  if(NOT DEFINED CMAKE_UNITY_BUILD)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${size})
  endif()
endfunction()

# For test programs. They spend most time in the library, so optimizing them costs more than it saves.
function(torchfuse_set_test_defaults target)
  torchfuse_set_defaults(${target})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
endfunction()

# Restricts a kernel library's exported symbols and versions them; see csrc/kernels/exports.map.in.
function(torchfuse_export_kernels target)
  set(exports "${PROJECT_BINARY_DIR}/kernels.map")
  configure_file("${PROJECT_SOURCE_DIR}/csrc/kernels/exports.map.in" "${exports}" @ONLY)
  target_link_options(
    ${target}
    PRIVATE "LINKER:--version-script=${exports}" LINKER:--no-undefined LINKER:-Bsymbolic-functions
  )
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${exports}")
endfunction()

# With tests: checks that every header in the target's header sets compiles on its own.
function(torchfuse_check_headers target)
  if(TORCHFUSE_BUILD_TESTS)
    set_target_properties(${target} PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)
  endif()
endfunction()

# Fails with a clear message if the compiler does not support C++20.
function(torchfuse_check_compiler)
  set(too_old FALSE)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
    set(too_old TRUE)
  endif()
  if(too_old OR NOT "cxx_std_20" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
    message(
      FATAL_ERROR
      "torchfuse: expected a C++20 compiler, g++ 12 or newer, got ${CMAKE_CXX_COMPILER_ID} "
      "${CMAKE_CXX_COMPILER_VERSION} in ${CMAKE_CXX_COMPILER}. Set CXX to a newer compiler."
    )
  endif()
endfunction()

# Fails with a clear message if the Python interpreter is too old or does not run.
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
      "Python_EXECUTABLE to a newer Python, or use TORCHFUSE_BUILD_PYTHON=OFF."
    )
  endif()
endfunction()

# Fails with a clear message if the located torch is not a supported version.
function(torchfuse_check_torch_is_supported)
  if(TORCHFUSE_TORCH_MINOR VERSION_LESS 2.11 OR TORCHFUSE_TORCH_MINOR VERSION_GREATER_EQUAL 2.16)
    message(
      FATAL_ERROR
      "torchfuse: expected torch to be at least 2.11 and older than 2.16, got "
      "${TORCHFUSE_TORCH_VERSION} in ${TORCHFUSE_TORCH_ROOT}. Install a supported torch, or set "
      "TORCHFUSE_TORCH_DIR to one."
    )
  endif()
  message(STATUS "torchfuse: using torch ${TORCHFUSE_TORCH_VERSION} in ${TORCHFUSE_TORCH_ROOT}")
  file(GLOB gomp "${TORCHFUSE_TORCH_ROOT}/lib/libgomp*.so*")
  if(NOT gomp)
    message(
      FATAL_ERROR
      "torchfuse: expected torch to ship its OpenMP runtime as ${TORCHFUSE_TORCH_ROOT}/lib/"
      "libgomp*.so*, got none. Use an official build of torch, because with another runtime the CPU "
      "kernels would not share torch's threads."
    )
  endif()
endfunction()

# Sets `result` to a path for `folder` that is equal in all build folders that share a compiler cache. The
# cache compares paths relative to the build folder, so the path is a link in the build folder. Without a
# cache, `result` is `folder`. The link's name is short because the cache prefers the shortest path.
function(torchfuse_same_path_for_compiler_cache result folder link)
  set(path "${folder}")
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    set(path "${CMAKE_BINARY_DIR}/.tf/${link}")
    file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/.tf")
    file(CREATE_LINK "${folder}" "${path}" SYMBOLIC)
  endif()
  set(${result} "${path}" PARENT_SCOPE)
endfunction()

# Removes the build machine's folders from the source paths in error messages.
function(torchfuse_name_sources_without_folders target)
  target_compile_options(
    ${target}
    PRIVATE
      "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/="
      "-fmacro-prefix-map=${PROJECT_BINARY_DIR}/="
      "-fmacro-prefix-map=${TORCHFUSE_TORCH_ROOT}/=torch/"
  )
endfunction()
