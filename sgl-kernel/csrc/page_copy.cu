#include <algorithm>

#include "fenceline/abi.h"
#include "launch.cuh"

namespace fenceline {
namespace {

// The link's latency (1 to 2 us) times its rate wants about 100 KB in flight: 64 KB per CTA, before any store waits.
constexpr uint32_t kThreads = 512;
constexpr uint32_t kUnroll = 8;

// The bytes pass once: no line of theirs is worth keeping in L1. Nobody writes the source while the kernel runs.
__device__ __forceinline__ Unit16 load_unit(const Unit16* from) {
  Unit16 unit;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
               : "l"(from));
  return unit;
}

__device__ __forceinline__ void store_unit(Unit16* to, const Unit16& unit) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(unit.x), "r"(unit.y), "r"(unit.z), "r"(unit.w)
               : "memory");
}

template <typename Unit>
__device__ __forceinline__ Unit load_unit(const Unit* from) {
  return __ldcs(from);
}

template <typename Unit>
__device__ __forceinline__ void store_unit(Unit* to, const Unit& unit) {
  __stcs(to, unit);
}

template <typename Unit, bool kToHost>
__global__ void __launch_bounds__(kThreads) page_copy_kernel(const __grid_constant__ PageCopyParams params) {
  const uint32_t step = gridDim.x * kThreads * kUnroll;
  for (uint32_t base = blockIdx.x * kThreads * kUnroll + threadIdx.x; base < params.num_units; base += step) {
    // Addresses first: were the page numbers' loads among the bytes' loads, waiting for one could mean waiting for all.
    const Unit* from[kUnroll];
    Unit* to[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t index = base + u * kThreads;
      const bool inside = index < params.num_units;
      const PageUnit unit = inside ? locate_unit<Unit>(params, index) : PageUnit{nullptr, nullptr, false};
      from[u] = reinterpret_cast<const Unit*>(kToHost ? unit.device : unit.host);
      to[u] = reinterpret_cast<Unit*>(kToHost ? unit.host : unit.device);
      if (unit.first && to[u] == nullptr && params.num_rejected != nullptr) atomicAdd(params.num_rejected, 1);
    }
    Unit values[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      if (to[u] != nullptr) values[u] = load_unit(from[u]);
    }
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      if (to[u] != nullptr) store_unit(to[u], values[u]);
    }
  }
}

template <typename Unit>
const char* launch_copy(PageCopyParams params, bool to_host, int32_t num_ctas, void* stream) {
  const uint32_t useful = (params.num_units + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  const dim3 grid(std::min(useful, static_cast<uint32_t>(num_ctas)));
  const auto kernel = to_host ? page_copy_kernel<Unit, true> : page_copy_kernel<Unit, false>;
  return launch(kernel, grid, kThreads, params, stream);
}

}  // namespace
}  // namespace fenceline

extern "C" const char* fenceline_copy_pages(const fenceline::PageCopyRequest* request, void* stream) {
  using namespace fenceline;
  return copy_pages(*request, [stream](const PageCopyParams& params, uint32_t unit_bytes, bool to_host, int32_t num_ctas) {
    switch (unit_bytes) {
      case 16: return launch_copy<Unit16>(params, to_host, num_ctas, stream);
      case 4: return launch_copy<uint32_t>(params, to_host, num_ctas, stream);
      default: return launch_copy<uint8_t>(params, to_host, num_ctas, stream);
    }
  });
}
