# Defines LibTorch::LibTorch: the CPU parts of LibTorch, whatever build of PyTorch they come from.
#
# PyTorch's own TorchConfig.cmake asks for a CUDA toolkit as soon as PyTorch was built with CUDA. This project links
# no CUDA library (the driver is opened at run time), so it takes the headers and the three libraries itself. Looked
# for, in this order: LIBTORCH_ROOT, Torch_DIR, CMAKE_PREFIX_PATH, and the PyTorch of the Python found in PATH.

if(NOT LIBTORCH_ROOT AND DEFINED Torch_DIR)
  get_filename_component(LIBTORCH_ROOT "${Torch_DIR}/../../.." ABSOLUTE)
endif()
foreach(_prefix IN LISTS CMAKE_PREFIX_PATH)
  # torch.utils.cmake_prefix_path is <torch>/share/cmake.
  if(NOT LIBTORCH_ROOT AND EXISTS "${_prefix}/Torch/TorchConfig.cmake")
    get_filename_component(LIBTORCH_ROOT "${_prefix}/../.." ABSOLUTE)
  endif()
endforeach()
if(NOT LIBTORCH_ROOT)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_Interpreter_FOUND)
    execute_process(
      COMMAND "${CMAKE_COMMAND}" -E env TORCH_DEVICE_BACKEND_AUTOLOAD=0
        "${Python3_EXECUTABLE}" -c "import os, torch; print(os.path.dirname(torch.__file__), end='')"
      OUTPUT_VARIABLE LIBTORCH_ROOT ERROR_QUIET)
  endif()
endif()

# NO_CACHE: a build folder may be configured for another PyTorch next time.
find_path(LIBTORCH_INCLUDE_DIR torch/csrc/distributed/c10d/Backend.hpp
  HINTS "${LIBTORCH_ROOT}/include" NO_DEFAULT_PATH NO_CACHE)
foreach(_name IN ITEMS c10 torch_cpu torch torch_python)
  find_library(LIBTORCH_${_name} ${_name} HINTS "${LIBTORCH_ROOT}/lib" NO_DEFAULT_PATH NO_CACHE)
endforeach()
if(LIBTORCH_INCLUDE_DIR AND EXISTS "${LIBTORCH_ROOT}/version.py")
  file(STRINGS "${LIBTORCH_ROOT}/version.py" _line REGEX "^__version__ = ")
  string(REGEX REPLACE ".*'(.+)'.*" "\\1" LibTorch_VERSION_FULL "${_line}")
  string(REGEX MATCH "^[0-9.]+" LibTorch_VERSION "${LibTorch_VERSION_FULL}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LIBTORCH_INCLUDE_DIR LIBTORCH_c10 LIBTORCH_torch_cpu LIBTORCH_torch
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "set CMAKE_PREFIX_PATH to what torch.utils.cmake_prefix_path says in Python")

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  find_package(Threads REQUIRED)
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  # SYSTEM: warnings in PyTorch's headers are not ours.
  set_target_properties(LibTorch::LibTorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${LIBTORCH_INCLUDE_DIR};${LIBTORCH_INCLUDE_DIR}/torch/csrc/api/include"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${LIBTORCH_INCLUDE_DIR};${LIBTORCH_INCLUDE_DIR}/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "${LIBTORCH_torch};${LIBTORCH_torch_cpu};${LIBTORCH_c10};Threads::Threads"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=1"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
