// The all-reduce on the GPU: the instructions that access memory, wait and convert. tests/all_reduce_emulation.cpp has others
// in their place.
//
// Within a launch, only st.release.sys and ld.acquire.sys order accesses between GPUs. Words are st.relaxed.sys and
// ld.relaxed.sys of 64 bits, each one access that holds data and generation; two travel in one instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "fenceline/all_reduce.h"

namespace fenceline {

__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_words(char* to, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

__device__ __forceinline__ void load_words(const char* from, uint64_t& a, uint64_t& b) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// Waits until the preceding kernel of the stream has ended and its writes can be read, if this one was launched before.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start as soon as all blocks have called this.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The words of PeerWatch, which lie in the host's memory.
__device__ __forceinline__ uint32_t load_watch(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_watch(uint32_t* to) {
  asm volatile("st.relaxed.sys.global.u32 [%0], 1;" ::"l"(to) : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

// Barrier `id` of `threads` threads of the block: named_sync waits there, named_arrive arrives without waiting.
__device__ __forceinline__ void named_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <typename T>
struct Values;

template <>
struct Values<__nv_bfloat16> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __bfloat1622float2(pairs[i]);
      f[2 * i] = two.x, f[2 * i + 1] = two.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[8]) {
    uint4 v;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

template <>
struct Values<__half> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
    const __half2* pairs = reinterpret_cast<const __half2*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __half22float2(pairs[i]);
      f[2 * i] = two.x, f[2 * i + 1] = two.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[8]) {
    uint4 v;
    __half2* pairs = reinterpret_cast<__half2*>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

template <>
struct Values<float> {
  static constexpr int kCount = 4;
  static __device__ __forceinline__ void unpack(const uint4& v, float (&f)[4]) {
    f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[4]) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  }
};

// Two rows of sums of the block's warps.
__device__ __forceinline__ float (&shared_parts())[2][32] {
  __shared__ float parts[2][32];
  return parts;
}

}  // namespace fenceline
