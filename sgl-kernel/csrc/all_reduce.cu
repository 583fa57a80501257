#include <dlfcn.h>

#include <cstring>

#include "all_reduce_device.cuh"  // before all_reduce_thread.cuh
#include "all_reduce_thread.cuh"
#include "fenceline/abi.h"

namespace fenceline {
namespace {

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error: it is reported here, not by a later call
  return cudaGetErrorString(error);
}

const char* launch(void (*kernel)(AllReduceRequest), AllReduceRequest& r, void* stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(r.num_blocks);
  config.blockDim = dim3(r.num_threads + 32);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = r.pdl ? 1 : 0;
  void* arguments[] = {&r};
  return text_of(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
}

template <typename T, int kSize>
const char* launch_kind(AllReduceRequest& r, void* stream) {
  void (*const kernels[])(AllReduceRequest) = {one_shot_kernel<T, kSize>, two_shot_kernel<T, kSize>,
                                               fused_kernel<T, kSize>, fused_two_shot_kernel<T, kSize>,
                                               fused_word_shot_kernel<T, kSize>};
  return launch(kernels[r.kind], r, stream);
}

template <typename T>
const char* launch_size(AllReduceRequest& r, void* stream) {
  switch (r.size) {
    case 2: return launch_kind<T, 2>(r, stream);
    case 4: return launch_kind<T, 4>(r, stream);
    case 8: return launch_kind<T, 8>(r, stream);
    default: return launch_kind<T, 0>(r, stream);
  }
}

}  // namespace
}  // namespace fenceline

using namespace fenceline;

static_assert(sizeof(cudaIpcMemHandle_t) == 64, "mirrored in Python");

// Adds up, or gathers, on `stream`. All ranks make the same launches in the same order.
extern "C" const char* fenceline_all_reduce(const AllReduceRequest* request, void* stream) {
  AllReduceRequest r = *request;
  if (const char* wrong = check_all_reduce(r)) return wrong;
  if (r.kind == 5) return launch(gather_kernel, r, stream);
  switch (r.dtype) {
    case 0: return launch_size<__nv_bfloat16>(r, stream);
    case 1: return launch_size<__half>(r, stream);
    default: return launch_kind<float, 0>(r, stream);
  }
}

// How much memory a rank needs, for `size`, `words_capacity` and `sums_capacity`.
extern "C" uint64_t fenceline_peer_bytes(const AllReduceRequest* request) { return peer_bytes(*request); }

// Zeroed memory of the current device that other processes can open with `handle` [64]. Waits for the device.
extern "C" const char* fenceline_peer_allocate(uint64_t num_bytes, void** memory, char* handle) {
  if (const char* wrong = text_of(cudaMalloc(memory, num_bytes))) return wrong;
  const char* wrong = text_of(cudaMemset(*memory, 0, num_bytes));
  if (!wrong) wrong = text_of(cudaDeviceSynchronize());
  if (!wrong) wrong = text_of(cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t*>(handle), *memory));
  if (wrong) cudaFree(*memory);
  return wrong;
}

extern "C" const char* fenceline_peer_free(void* memory) { return text_of(cudaFree(memory)); }

// The handle of the allocation in which `memory` is, and the offset in it in bytes.
extern "C" const char* fenceline_peer_locate(void* memory, char* handle, uint64_t* offset) {
  using AddressRange = int (*)(unsigned long long*, size_t*, unsigned long long);
  static const AddressRange address_range = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    return reinterpret_cast<AddressRange>(driver == nullptr ? nullptr : dlsym(driver, "cuMemGetAddressRange_v2"));
  }();
  if (address_range == nullptr) return "the CUDA driver has no cuMemGetAddressRange_v2";
  const unsigned long long address = reinterpret_cast<uintptr_t>(memory);
  unsigned long long base = 0;
  size_t num_bytes = 0;
  if (address_range(&base, &num_bytes, address) != 0) return "the memory is not the driver's";
  *offset = address - base;
  return text_of(cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t*>(handle), reinterpret_cast<void*>(base)));
}

// Opens the memory of another process, on the current device or on one that it can reach.
extern "C" const char* fenceline_peer_open(const char* handle, void** memory) {
  cudaIpcMemHandle_t value;
  std::memcpy(&value, handle, sizeof(value));
  return text_of(cudaIpcOpenMemHandle(memory, value, cudaIpcMemLazyEnablePeerAccess));
}

extern "C" const char* fenceline_peer_close(void* memory) { return text_of(cudaIpcCloseMemHandle(memory)); }
