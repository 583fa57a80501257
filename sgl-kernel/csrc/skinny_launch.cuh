// The launch of a skinny GEMM. Each unit (.cu) has the kernels for weights whose numbers have a certain number of bits.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "skinny_device.cuh"
#include "skinny_direct.cuh"
#include "skinny_kernel.cuh"

namespace fenceline {
namespace {

constexpr uint32_t kMaxThreads = 512;

template <Numbers kNumbers, int kRowTiles, int kTiles, bool kNorm>
__global__ void __launch_bounds__(kMaxThreads, 1) skinny_gemm_kernel(const __grid_constant__ SkinnyGemmParams params) {
  extern __shared__ __align__(128) char shared[];
  SkinnyGemm<kNumbers, kRowTiles, kTiles, kNorm>(params, shared).run();
}

// With 80 registers for each thread 24 warps run on a multiprocessor, with 128 registers 16.
template <Numbers kNumbers, int kDepth, bool kNorm>
__global__ void __launch_bounds__(kMaxDirectWarps * 32, kDepth == 2 ? 2 : 1)
    skinny_direct_kernel(const __grid_constant__ SkinnyGemmParams params) {
  extern __shared__ __align__(128) char shared[];
  DirectGemm<kNumbers, kDepth, kNorm>(params, shared).run();
}

using Kernel = void (*)(SkinnyGemmParams);

template <Numbers kNumbers, int kRowTiles, int kTiles>
Kernel with_norm(bool norm) {
  return norm ? skinny_gemm_kernel<kNumbers, kRowTiles, kTiles, true> : skinny_gemm_kernel<kNumbers, kRowTiles, kTiles, false>;
}

template <Numbers kNumbers>
Kernel find_direct(const SkinnyGemmRequest& r) {
  if constexpr (kNumbers == Numbers::kFp8 || kNumbers == Numbers::kInt4) {
    const bool norm = r.norm_weight != nullptr;
    if (r.depth == 2) return norm ? skinny_direct_kernel<kNumbers, 2, true> : skinny_direct_kernel<kNumbers, 2, false>;
    return norm ? skinny_direct_kernel<kNumbers, 4, true> : skinny_direct_kernel<kNumbers, 4, false>;
  }
  return nullptr;
}

// Only configurations that were the fastest on some GPU, since each case is two kernels to compile for each
// architecture.
template <Numbers kNumbers>
Kernel find_kernel(const SkinnyGemmRequest& r) {
  if (r.direct) return find_direct<kNumbers>(r);
  const bool norm = r.norm_weight != nullptr, few = r.rows <= 8;
  if (r.tiles == 2) return few ? with_norm<kNumbers, 1, 2>(norm) : with_norm<kNumbers, 2, 2>(norm);
  if (r.tiles == 4) return few ? with_norm<kNumbers, 1, 4>(norm) : with_norm<kNumbers, 2, 4>(norm);
  if constexpr (kNumbers == Numbers::kBf16) {
    if (r.tiles == 3) return few ? with_norm<kNumbers, 1, 3>(norm) : nullptr;
    if (r.tiles == 6) return few ? with_norm<kNumbers, 1, 6>(norm) : with_norm<kNumbers, 2, 6>(norm);
  } else if constexpr (kNumbers != Numbers::kInt4Groups) {
    if (r.tiles == 6) return few ? with_norm<kNumbers, 1, 6>(norm) : nullptr;
  }
  return nullptr;
}

cudaError_t launch_skinny(Kernel kernel, const SkinnyGemmRequest& r, SkinnyGemmParams& params, void* stream) {
  const uint32_t num_warps = static_cast<uint32_t>(r.warps_n * r.warps_k);
  const uint32_t most = params.num_blocks * params.cluster;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(r.num_ctas == 0 ? most : std::min(most, static_cast<uint32_t>(r.num_ctas)));
  config.blockDim = dim3(num_warps * 32);
  config.dynamicSmemBytes = shared_bytes(r, params);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (r.pdl) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (r.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {params.cluster, 1, 1};
  }
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(config.dynamicSmemBytes));
  if (error != cudaSuccess) return error;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&config, function, arguments);
}

// Returns null, or why there was no launch. `numbers`: the kinds for which the unit has kernels.
template <Numbers... numbers>
const char* skinny_gemm(const SkinnyGemmRequest& request, void* stream) {
  if (const char* wrong = check_skinny_gemm(request)) return wrong;
  Kernel kernel = nullptr;
  ((kernel = numbers == numbers_of(request) ? find_kernel<numbers>(request) : kernel), ...);
  if (kernel == nullptr) return "skinny_gemm has no such kernel";
  SkinnyGemmParams params = plan_skinny_gemm(request);
  const cudaError_t error = launch_skinny(kernel, request, params, stream);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error: it is reported here, not by a later call
  return cudaGetErrorString(error);
}

}  // namespace
}  // namespace fenceline
