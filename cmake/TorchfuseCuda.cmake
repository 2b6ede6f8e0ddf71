# SPDX-License-Identifier: BSD-3-Clause
# Chooses whether to build for CUDA, the nvcc, and the architectures.
cmake_policy(VERSION 3.25)

# Translates torch's notation to CMake's: "8.0;9.0+PTX" -> "80-real;90". Spaces and commas are accepted
# as separators too. CMake's "90" means machine code and PTX; "90-real" means machine code only.
function(torchfuse_translate_arch_list out arch_list)
  string(REGEX REPLACE "[ ,;]+" ";" entries "${arch_list}")
  list(REMOVE_ITEM entries "")
  set(result "")
  foreach(entry IN LISTS entries)
    if(NOT entry MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
      message(
        FATAL_ERROR
        "torchfuse: expected TORCH_CUDA_ARCH_LIST to hold entries such as 9.0 or 9.0+PTX, got "
        "'${entry}'."
      )
    endif()
    if(CMAKE_MATCH_3)
      list(APPEND result "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    else()
      list(APPEND result "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES result)
  set(${out} "${result}" PARENT_SCOPE)
endfunction()

# Translates CMake's notation to torch's for messages: "80-real;90" -> "8.0, 9.0+PTX". Other CMake
# values, such as "native", are unchanged.
function(torchfuse_name_cuda_architectures out architectures)
  list(TRANSFORM architectures REPLACE "^([0-9]+)([0-9][af]?)$" "\\1.\\2+PTX")
  list(TRANSFORM architectures REPLACE "^([0-9]+)([0-9][af]?)-real$" "\\1.\\2")
  list(JOIN architectures ", " names)
  set(${out} "${names}" PARENT_SCOPE)
endfunction()

# Sets the architectures from the first of CMAKE_CUDA_ARCHITECTURES, CUDAARCHS, TORCH_CUDA_ARCH_LIST, or
# from a default list, whose last entry includes PTX for newer GPUs. Must run before CUDA is enabled.
function(torchfuse_choose_cuda_architectures)
  if(DEFINED CMAKE_CUDA_ARCHITECTURES)
    # In a configured build folder, the value may be the cached choice of an earlier run. Keep the value
    # unless TORCH_CUDA_ARCH_LIST is set.
    if(
      "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL ""
      OR NOT "${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "${TORCHFUSE_CHOSEN_ARCHITECTURES}"
    )
      return()
    endif()
  elseif(DEFINED ENV{CUDAARCHS})
    return()
  endif()
  if(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    torchfuse_translate_arch_list(architectures "$ENV{TORCH_CUDA_ARCH_LIST}")
  elseif(TORCHFUSE_NVCC_VERSION VERSION_LESS 12.8)
    set(architectures 80-real 90)
  else()
    set(architectures 80-real 90-real 100-real 120)
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${architectures}" CACHE STRING "CUDA architectures" FORCE)
  set(TORCHFUSE_CHOSEN_ARCHITECTURES "${architectures}" CACHE INTERNAL "Chosen by torchfuse")
endfunction()

# Sets TORCHFUSE_NVCC and TORCHFUSE_NVCC_VERSION, empty if no nvcc was found. TORCHFUSE_NVCC_ERROR states
# why a found nvcc cannot be used.
function(_torchfuse_find_nvcc)
  if(TORCHFUSE_TORCH_CUDA_VERSION)
    string(REGEX MATCH "^[0-9]+" major "${TORCHFUSE_TORCH_CUDA_VERSION}")
    # pip installs the toolkit's wheels beside torch.
    cmake_path(GET TORCHFUSE_TORCH_ROOT PARENT_PATH site_packages)
    set(beside_torch "${site_packages}/nvidia/cu${major}/bin")
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(TORCHFUSE_NVCC "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(TORCHFUSE_NVCC "$ENV{CUDACXX}")
  else()
    find_program(
      TORCHFUSE_NVCC
      nvcc
      HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin"
      PATHS /usr/local/cuda/bin "${beside_torch}"
      DOC "The CUDA compiler"
    )
  endif()
  set(version "")
  set(error "")
  if(TORCHFUSE_NVCC)
    execute_process(
      COMMAND "${TORCHFUSE_NVCC}" --version
      OUTPUT_VARIABLE output
      ERROR_VARIABLE output
      RESULT_VARIABLE status
    )
    if(status EQUAL 0 AND output MATCHES "release ([0-9]+\\.[0-9]+)")
      set(version "${CMAKE_MATCH_1}")
    else()
      set(error "${TORCHFUSE_NVCC} --version fails (${status})")
    endif()
  endif()
  set(TORCHFUSE_NVCC "${TORCHFUSE_NVCC}" PARENT_SCOPE)
  set(TORCHFUSE_NVCC_VERSION "${version}" PARENT_SCOPE)
  set(TORCHFUSE_NVCC_ERROR "${error}" PARENT_SCOPE)
endfunction()

# Compiles an empty kernel, because an nvcc that prints its version may still lack files or not support
# the host compiler. Sets `out` to an error with nvcc's first line, or to an empty string.
function(_torchfuse_try_nvcc out)
  set(${out} "" PARENT_SCOPE)
  if(TORCHFUSE_WORKING_NVCC STREQUAL TORCHFUSE_NVCC)
    return()
  endif()
  set(folder "${CMAKE_BINARY_DIR}/CMakeFiles/torchfuse_try_nvcc")
  file(WRITE "${folder}/empty.cu" "__global__ void empty() {}\n")
  set(host "")
  foreach(compiler "${CMAKE_CUDA_HOST_COMPILER}" "$ENV{CUDAHOSTCXX}")
    if(compiler AND NOT host)
      set(host -ccbin "${compiler}")
    endif()
  endforeach()
  execute_process(
    COMMAND "${TORCHFUSE_NVCC}" ${host} -std=c++20 -c empty.cu -o empty.o
    WORKING_DIRECTORY "${folder}"
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
    RESULT_VARIABLE status
  )
  if(status EQUAL 0)
    set(TORCHFUSE_WORKING_NVCC "${TORCHFUSE_NVCC}" CACHE INTERNAL "Compiled an empty kernel")
    return()
  endif()
  string(STRIP "${output}" output)
  string(REGEX MATCH "^[^\n]*" line "${output}")
  set(${out} "${TORCHFUSE_NVCC} cannot compile an empty kernel (${line})" PARENT_SCOPE)
endfunction()

# Sets `out` to the reason why CUDA cannot be built, as a clause, or to an empty string.
function(_torchfuse_reason_against_cuda out)
  set(reason "")
  string(REGEX MATCH "^[0-9]+" torch_major "${TORCHFUSE_TORCH_CUDA_VERSION}")
  string(REGEX MATCH "^[0-9]+" nvcc_major "${TORCHFUSE_NVCC_VERSION}")
  if(NOT TORCHFUSE_KERNELS_ONLY AND NOT TORCHFUSE_TORCH_CUDA_VERSION)
    set(reason "torch ${TORCHFUSE_TORCH_VERSION} was built without CUDA")
  elseif(TORCHFUSE_NVCC_ERROR)
    set(reason "${TORCHFUSE_NVCC_ERROR}")
  elseif(NOT TORCHFUSE_NVCC_VERSION)
    set(reason "no nvcc was found on PATH, in CUDA_HOME or in CUDACXX")
  elseif(NOT TORCHFUSE_KERNELS_ONLY AND NOT torch_major STREQUAL nvcc_major)
    set(
      reason
      "torch uses CUDA ${TORCHFUSE_TORCH_CUDA_VERSION} but nvcc is ${TORCHFUSE_NVCC_VERSION}"
    )
  elseif(TORCHFUSE_NVCC_VERSION VERSION_LESS 12.1)
    # kMaxArgumentBytes in csrc/kernels/cuda/launch.cuh.
    string(
      CONCAT reason
      "nvcc ${TORCHFUSE_NVCC_VERSION} passes at most 4 KB of arguments to a kernel; 12.1 is the "
      "oldest that passes 32 KB"
    )
  else()
    _torchfuse_try_nvcc(reason)
  endif()
  set(${out} "${reason}" PARENT_SCOPE)
endfunction()

# Sets `out` to a remedy for TORCHFUSE_WITH_CUDA=ON. PyPI provides nvcc since CUDA 13. All its parts must
# have the version of cuda-toolkit, the package through which torch pins its CUDA libraries.
function(_torchfuse_cuda_remedy out)
  set(version "")
  file(GLOB toolkit "${TORCHFUSE_TORCH_ROOT}/../cuda_toolkit-*.dist-info")
  if(toolkit MATCHES "cuda_toolkit-([0-9.]+)\\.dist-info")
    set(version "${CMAKE_MATCH_1}")
  elseif(TORCHFUSE_TORCH_CUDA_VERSION STREQUAL "13.0")
    set(version 13.0.2)
  endif()
  if(version VERSION_GREATER_EQUAL 13)
    string(
      CONCAT remedy
      "Install the CUDA toolkit, or its compiler beside torch with: pip install "
      "'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==${version}'"
    )
  else()
    set(remedy "Install a torch with CUDA and the matching CUDA toolkit")
  endif()
  set(${out} "${remedy}" PARENT_SCOPE)
endfunction()

# Sets `out` to ON or OFF and prints the choice. A macro, because the caller needs CMAKE_CUDA_COMPILER
# for enable_language().
macro(torchfuse_choose_cuda out)
  set(${out} OFF)
  string(TOUPPER "${TORCHFUSE_WITH_CUDA}" _torchfuse_wish)
  if(_torchfuse_wish STREQUAL "AUTO" OR TORCHFUSE_WITH_CUDA)
    _torchfuse_find_nvcc()
    _torchfuse_reason_against_cuda(_torchfuse_reason)
    if(NOT _torchfuse_reason)
      set(${out} ON)
      set(CMAKE_CUDA_COMPILER "${TORCHFUSE_NVCC}" CACHE FILEPATH "The CUDA compiler")
      message(
        STATUS
        "torchfuse: building for CPU and CUDA (nvcc ${TORCHFUSE_NVCC_VERSION} in ${TORCHFUSE_NVCC})"
      )
    elseif(_torchfuse_wish STREQUAL "AUTO")
      message(STATUS "torchfuse: building for CPU only: ${_torchfuse_reason}")
    else()
      _torchfuse_cuda_remedy(_torchfuse_remedy)
      message(
        FATAL_ERROR
        "torchfuse: TORCHFUSE_WITH_CUDA=ON, but ${_torchfuse_reason}. ${_torchfuse_remedy}; or use "
        "TORCHFUSE_WITH_CUDA=OFF."
      )
    endif()
  else()
    message(STATUS "torchfuse: building for CPU only: TORCHFUSE_WITH_CUDA=${TORCHFUSE_WITH_CUDA}")
  endif()
endmacro()
