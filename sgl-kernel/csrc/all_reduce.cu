#include <dlfcn.h>

#include <cstring>

#include "all_reduce_device.cuh"
#include "fenceline/abi.h"
#include "launch.cuh"

namespace fenceline {
namespace {

template <typename T, int kSize>
__global__ void __launch_bounds__(kMaxThreads + 32) one_shot_kernel(const __grid_constant__ AllReduceRequest r) {
  GpuThread<T, kSize> thread(r);
  if (threadIdx.x >= r.num_threads) {
    flag_steps(thread, r);
  } else {
    one_shot_steps(thread, r);
  }
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kMaxThreads + 32) two_shot_kernel(const __grid_constant__ AllReduceRequest r) {
  GpuThread<T, kSize> thread(r);
  if (threadIdx.x >= r.num_threads) {
    flag_steps(thread, r);
  } else {
    two_shot_steps(thread, r);
  }
}

// The sum of `value` over the threads for data of a block, the same for all of them.
__device__ __forceinline__ float block_sum(float value, uint32_t num_threads, float* parts) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  named_sync(kShot, num_threads);
  float total = 0.0f;
  for (uint32_t i = 0; i < num_threads / 32; ++i) total += parts[i];
  return total;
}

// One shot, a block for each row: hidden = round(sum) + residual, normed = hidden / sqrt(mean of squares + eps) *
// weight.
template <typename T, int kSize>
__global__ void __launch_bounds__(kMaxThreads + 32) fused_kernel(const __grid_constant__ AllReduceRequest r) {
  constexpr int kMost = 4;  // vectors of a row that a thread has
  constexpr int kCount = Values<T>::kCount;
  __shared__ float parts[2][32];
  GpuThread<T, kSize> thread(r);
  if (threadIdx.x >= r.num_threads) {
    flag_steps(thread, r);
    return;
  }
  const uint32_t num_rows = r.num_vectors / r.row_vectors;
  thread.begin();
  thread.arrive();
  for (uint32_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    for (uint32_t c = threadIdx.x; c < r.row_vectors; c += r.num_threads) {
      const uint32_t v = row * r.row_vectors + c;
      push_vector(thread, r, thread.read(v), v);
    }
  }
  uint32_t turn = 0;
  for (uint32_t row = blockIdx.x; row < num_rows; row += gridDim.x, ++turn) {
    uint4 hidden[kMost];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const uint32_t c = threadIdx.x + k * r.num_threads;
      if (c >= r.row_vectors) break;
      const uint32_t v = row * r.row_vectors + c;
      const uint4 residual = reinterpret_cast<const uint4*>(r.residual)[v];  // read while words are on their way
      const typename GpuThread<T, kSize>::Sum sum = thread.sum_of_words(thread.own(v), v);
      float rounded[kCount], added[kCount];
      Values<T>::unpack(Values<T>::pack(sum.values), rounded);
      Values<T>::unpack(residual, added);
#pragma unroll
      for (int i = 0; i < kCount; ++i) added[i] += rounded[i];
      hidden[k] = Values<T>::pack(added);
      reinterpret_cast<uint4*>(r.hidden)[v] = hidden[k];
      Values<T>::unpack(hidden[k], added);
#pragma unroll
      for (int i = 0; i < kCount; ++i) squares += added[i] * added[i];
    }
    const float mean = block_sum(squares, r.num_threads, parts[turn % 2]) / (r.row_vectors * kCount);
    const float scale = rsqrtf(mean + r.eps);
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const uint32_t c = threadIdx.x + k * r.num_threads;
      if (c >= r.row_vectors) break;
      float weight[kCount], values[kCount];
      Values<T>::unpack(reinterpret_cast<const uint4*>(r.weight)[c], weight);
      Values<T>::unpack(hidden[k], values);
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = values[i] * scale * weight[i];
      reinterpret_cast<uint4*>(r.normed)[row * r.row_vectors + c] = Values<T>::pack(values);
    }
  }
}

// One shot without a sum: a rank gets all ranks' vectors, in the order of ranks.
__global__ void __launch_bounds__(kMaxThreads + 32) gather_kernel(const __grid_constant__ AllReduceRequest r) {
  GpuThread<__nv_bfloat16, 0> thread(r);
  if (threadIdx.x >= r.num_threads) {
    flag_steps(thread, r);
    return;
  }
  thread.begin();
  thread.arrive();
  const uint32_t first = blockIdx.x * r.num_threads + threadIdx.x, step = gridDim.x * r.num_threads;
  for (uint32_t v = first; v < r.num_vectors; v += step) push_vector(thread, r, thread.read(v), v);
  uint4* out = reinterpret_cast<uint4*>(r.hidden);
  for (uint32_t v = first; v < r.num_vectors; v += step) {
    for (int rank = 0; rank < r.size; ++rank) {
      out[uint64_t{r.num_vectors} * rank + v] = rank == r.rank ? thread.own(v) : thread.words_of(rank, v);
    }
  }
}

template <typename T, int kSize>
const char* launch_kind(AllReduceRequest& r, void* stream) {
  void (*const kernels[])(AllReduceRequest) = {one_shot_kernel<T, kSize>, two_shot_kernel<T, kSize>, fused_kernel<T, kSize>};
  return launch(kernels[r.kind], dim3(r.num_blocks), r.num_threads + 32, r, stream);
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

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error: it is reported here, not by a later call
  return cudaGetErrorString(error);
}

}  // namespace
}  // namespace fenceline

using namespace fenceline;

static_assert(sizeof(cudaIpcMemHandle_t) == 64, "mirrored in Python");

// Adds up, or gathers, on `stream`. All ranks make the same launches in the same order.
extern "C" const char* fenceline_all_reduce(const AllReduceRequest* request, void* stream) {
  AllReduceRequest r = *request;
  if (const char* wrong = check_all_reduce(r)) return wrong;
  if (r.kind == 3) return launch(gather_kernel, dim3(r.num_blocks), r.num_threads + 32, r, stream);
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
