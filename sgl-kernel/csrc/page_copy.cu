#include <algorithm>

#include "fenceline/abi.h"
#include "launch.cuh"

namespace fenceline {
namespace {

// To use the link's full rate with its latency (1 to 2 us), about 100 KB must be in flight: 64 KB per CTA are loaded
// before the first store.
constexpr uint32_t kThreads = 512;
constexpr uint32_t kUnroll = 8;

// Every byte is read once, so nothing is kept in L1. These loads are not .nc, although the source is not written while the
// kernel runs: the assembler would move such loads after the stores of earlier ones and keep only one or two in flight.
__device__ __forceinline__ Unit16 load_unit(const Unit16* from) {
  Unit16 unit;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
               : "l"(from)
               : "memory");
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

template <typename Unit, int kMaxPages, bool kToHost>
__global__ void __launch_bounds__(kThreads) page_copy_kernel(const __grid_constant__ PageCopyParams<kMaxPages> params) {
  const uint32_t num_units = params.shape.num_units;
  const uint32_t step = gridDim.x * kThreads * kUnroll;
  for (uint32_t base = blockIdx.x * kThreads * kUnroll + threadIdx.x; base < num_units; base += step) {
    // Addresses first: if loads of page numbers were mixed with loads of bytes, waiting for one could mean waiting for all.
    // Past the end the last unit is copied again, the same bytes to the same place, because branches would mix the loads.
    const Unit* from[kUnroll];
    Unit* to[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      const uint32_t index = min(base + u * kThreads, num_units - 1);
      const PageUnit unit = locate_unit<Unit>(params.shape, params.pages, index);
      from[u] = reinterpret_cast<const Unit*>(kToHost ? unit.device : unit.host);
      to[u] = reinterpret_cast<Unit*>(kToHost ? unit.host : unit.device);
    }
    Unit values[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) values[u] = load_unit(from[u]);
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) store_unit(to[u], values[u]);
  }
}

template <typename Unit, int kMaxPages>
const char* launch_copy(PageCopyParams<kMaxPages> params, const PageCopyRequest& request, void* stream) {
  const uint32_t useful = (params.shape.num_units + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  const dim3 grid(std::min(useful, static_cast<uint32_t>(request.num_ctas)));
  const auto kernel =
      request.to_host ? page_copy_kernel<Unit, kMaxPages, true> : page_copy_kernel<Unit, kMaxPages, false>;
  return launch(kernel, grid, kThreads, params, stream);
}

}  // namespace
}  // namespace fenceline

extern "C" const char* fenceline_copy_pages(fenceline::PageCopyRequest* request, void* stream) {
  using namespace fenceline;
  return copy_pages(*request, [request, stream](const auto& params, uint32_t unit_bytes) {
    switch (unit_bytes) {
      case 16: return launch_copy<Unit16>(params, *request, stream);
      case 4: return launch_copy<uint32_t>(params, *request, stream);
      default: return launch_copy<uint8_t>(params, *request, stream);
    }
  });
}
