// Skinny GEMM: few rows times a large weight, bfloat16 in and out, float32 sums. Its time is that of reading the weight
// once at memory bandwidth; everything else overlaps with that.
//
//   y[m, n] = sum_k norm(x)[m, k] * weight[n, k] + bias[n]        m < rows <= 16
//   out[m, n] = y[m, n]                                           plain:    weight [num_out, k]
//             = residual[m, n] + y[m, n]                          residual: may be `out` itself
//             = silu(y[m, n]) * y[m, num_out + n]                 gated:    weight [2 * num_out, k], gates first
// norm is absent or RMSNorm over k: x / sqrt(mean(x^2) + eps) * norm_weight.
//
// A CTA of warps_n * warps_k warps processes warps_n * tiles * 8 rows of the weight (a block) at a time and takes blocks
// blockIdx, blockIdx + num_ctas, ... The warps_k warps of a row divide K among them, 64 elements in turn; `cluster` CTAs
// may divide it further. Each lane copies the 16-byte pieces that it will multiply itself into its own ring of `depth`
// stages in shared memory, so the loads need no barrier and continue across blocks. The partial sums are added in shared
// memory in a fixed order: results do not depend on timing, nor one row on the others.
//
// With `pdl` the launch may begin while the preceding kernel of the stream is still running. The weight, norm_weight
// and bias are read at once, and must have been written before that kernel; x, residual and out are accessed
// only after it has ended.
#pragma once

#include "fenceline/common.h"

namespace fenceline {

constexpr int kMaxSkinnyRows = 16;
constexpr int kSkinnyStepK = 64;  // elements of K that a warp takes at a time

// Part of the C ABI: python/fenceline_kernel/skinny.py mirrors it.
struct SkinnyGemmRequest {
  const void* x;            // [rows, k] contiguous, 16-byte aligned
  const void* weight;       // [num_out, k] or [2 * num_out, k] contiguous, 16-byte aligned
  const void* norm_weight;  // [k] 16-byte aligned, or null
  const void* bias;         // [num_out] or [2 * num_out], or null
  const void* residual;     // [rows, num_out] contiguous, or null
  void* out;                // [rows, num_out] contiguous
  int32_t rows;
  int32_t num_out;
  int32_t k;                // a multiple of 8
  float eps;
  int32_t gated;            // 1 or 0
  int32_t tiles;            // of 8 weight rows for each warp: 2, 4 or 6, or 3 for up to 8 rows
  int32_t warps_n;
  int32_t warps_k;          // warps_n * warps_k <= 16
  int32_t depth;            // 2, 3, 4 or 6 stages in flight
  int32_t cluster;          // CTAs along K: 1, 2, 4 or 8 (sm_90 on)
  int32_t num_ctas;         // upper bound of the grid, a multiple of cluster; 0: one block of rows for each CTA
  int32_t prefetch_bytes;   // of each row of the CTA's first block, beyond the ring, prefetched into L2 (sm_90 on)
  int32_t pdl;              // 1 or 0 (sm_90 on)
  int32_t reserved;
};
static_assert(sizeof(SkinnyGemmRequest) == 104, "mirrored in Python");

// The kernel's argument, passed by value.
struct SkinnyGemmParams {
  const char* x;
  const char* weight;
  const char* norm_weight;
  const uint16_t* bias;
  const uint16_t* residual;
  uint16_t* out;
  uint32_t rows, num_out, k;
  float eps;
  uint32_t gated, warps_k, depth, cluster;
  uint32_t block_rows;   // of the weight: warps_n * tiles * 8
  uint32_t sum_stride;   // floats from one row of partial sums to the next, so that rows use different banks
  uint32_t num_blocks;
  uint32_t steps;        // for each warp and block
  uint32_t stage_bytes;  // for each warp: tiles * 1024 + rows * 128 (+ 128 with norm)
  uint32_t prefetch_bytes;
};

// Returns null, or what is wrong with the request.
inline const char* check_skinny_gemm(const SkinnyGemmRequest& r) {
  if (r.rows < 1 || r.rows > kMaxSkinnyRows) return "skinny_gemm takes 1 to 16 rows";
  const bool known_tiles = r.tiles == 2 || (r.tiles == 3 && r.rows <= 8) || r.tiles == 4 || r.tiles == 6;
  if (!known_tiles) return "skinny_gemm takes 2, 4 or 6 tiles for each warp, 3 for up to 8 rows";
  if (r.k < 8 || r.k % 8 != 0 || r.num_out < 1) return "skinny_gemm needs k a multiple of 8 and an output";
  if ((reinterpret_cast<uintptr_t>(r.x) | reinterpret_cast<uintptr_t>(r.weight) |
       reinterpret_cast<uintptr_t>(r.norm_weight)) & 15) return "skinny_gemm needs operands aligned to 16 bytes";
  if (r.warps_n < 1 || r.warps_k < 1 || r.warps_n * r.warps_k > 16) return "skinny_gemm takes 1 to 16 warps";
  if (r.gated && r.warps_n * r.tiles % 2 != 0) return "a gated block has an even number of tiles";
  if (r.gated && r.residual != nullptr) return "a gated product has no residual";
  if (r.depth != 2 && r.depth != 3 && r.depth != 4 && r.depth != 6) return "skinny_gemm takes 2, 3, 4 or 6 stages";
  if (r.cluster != 1 && r.cluster != 2 && r.cluster != 4 && r.cluster != 8) return "a cluster has 1, 2, 4 or 8 CTAs";
  if (r.num_ctas % r.cluster != 0 || r.num_ctas < 0) return "num_ctas is no multiple of the cluster";
  const int64_t weight_rows = int64_t{r.num_out} * (r.gated ? 2 : 1);
  if (weight_rows * (r.k / 8) >= (int64_t{1} << 32)) return "the weight is too large for skinny_gemm";
  return nullptr;
}

inline SkinnyGemmParams plan_skinny_gemm(const SkinnyGemmRequest& r) {
  SkinnyGemmParams p{};
  p.x = static_cast<const char*>(r.x);
  p.weight = static_cast<const char*>(r.weight);
  p.norm_weight = static_cast<const char*>(r.norm_weight);
  p.bias = static_cast<const uint16_t*>(r.bias);
  p.residual = static_cast<const uint16_t*>(r.residual);
  p.out = static_cast<uint16_t*>(r.out);
  p.rows = static_cast<uint32_t>(r.rows);
  p.num_out = static_cast<uint32_t>(r.num_out);
  p.k = static_cast<uint32_t>(r.k);
  p.eps = r.eps;
  p.gated = r.gated ? 1 : 0;
  p.warps_k = static_cast<uint32_t>(r.warps_k);
  p.depth = static_cast<uint32_t>(r.depth);
  p.cluster = static_cast<uint32_t>(r.cluster);
  p.block_rows = static_cast<uint32_t>(r.warps_n * r.tiles * 8);
  p.sum_stride = p.block_rows + 8;
  const uint32_t block_outs = p.block_rows >> p.gated;
  p.num_blocks = (p.num_out + block_outs - 1) / block_outs;
  const uint32_t step = kSkinnyStepK * p.warps_k * p.cluster;
  p.steps = (p.k + step - 1) / step;
  p.stage_bytes = static_cast<uint32_t>(r.tiles) * 1024 + p.rows * 128 + (r.norm_weight != nullptr ? 128 : 0);
  p.prefetch_bytes = static_cast<uint32_t>(r.prefetch_bytes) & ~15u;
  return p;
}

// Rings of all warps, then the partial sums [warps_k][rows][sum_stride], then those of the squares [warps_k][rows].
inline uint32_t skinny_ring_bytes(const SkinnyGemmParams& p, uint32_t num_warps) {
  return num_warps * p.depth * p.stage_bytes;
}

inline uint32_t skinny_shared_bytes(const SkinnyGemmParams& p, uint32_t num_warps) {
  return skinny_ring_bytes(p, num_warps) + p.warps_k * p.rows * (p.sum_stride + 1) * 4;
}

}  // namespace fenceline
