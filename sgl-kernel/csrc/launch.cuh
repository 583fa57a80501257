// One kernel launch that returns its own error: cudaGetLastError would also report errors of earlier calls.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fenceline {

template <typename Params>
const char* launch(void (*kernel)(Params), dim3 grid, uint32_t num_threads, Params& params, void* stream) {
  void* arguments[] = {&params};
  const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(num_threads), arguments, 0,
                                             static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error: it is reported here, not by a later call
  return cudaGetErrorString(error);
}

}  // namespace fenceline
