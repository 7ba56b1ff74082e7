# The CUDA module: machine code for every architecture that both we and this nvcc know, and PTX of the newest.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  execute_process(
    COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
    OUTPUT_VARIABLE known_codes COMMAND_ERROR_IS_FATAL ANY)
  set(CMAKE_CUDA_ARCHITECTURES)
  foreach(arch 80 86 89 90 100 120)
    if(known_codes MATCHES "sm_${arch}[\r\n]")
      list(APPEND CMAKE_CUDA_ARCHITECTURES "${arch}-real")
      set(newest ${arch})
    endif()
  endforeach()
  list(APPEND CMAKE_CUDA_ARCHITECTURES "${newest}-virtual")
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

kvcanary_module(_cuda bindings/cuda_module.cc cuda/grid.cu cuda/verify.cu cuda/write.cu)
target_include_directories(_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--threads=0>)
