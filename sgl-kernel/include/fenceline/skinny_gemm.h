// Skinny GEMM: few rows times a large weight, bfloat16 in and out, float32 sums. Its time is that of reading the weight
// once at memory bandwidth; everything else overlaps with that. The weight's numbers are bfloat16, E4M3 or whole
// numbers of four bits, as layers/quantized.py stores them; in registers they become bfloat16 for the tensor core,
// without rounding.
//
//   y[m, n] = sum_k norm(x)[m, k] * weight[n, k] + bias[n]        m < rows <= 16
//   out[m, n] = y[m, n]                                           plain:    weight [num_out, k]
//             = residual[m, n] + y[m, n]                          residual: may be `out` itself
//             = silu(y[m, n]) * y[m, num_out + n]                 gated:    weight [2 * num_out, k], gates first
// norm is absent or RMSNorm over k: x / sqrt(mean(x^2) + eps) * norm_weight.
//
// A CTA of warps_n * warps_k warps processes warps_n * tiles * 8 rows of the weight (a block) at a time and takes
// blocks blockIdx, blockIdx + num_ctas, ... The warps_k warps of a row take pieces of 128 bytes along K in turn;
// `cluster` CTAs may divide K further. Each warp copies the 16-byte pieces that it will multiply itself into its own
// ring of `depth` stages in shared memory, so the loads need no barrier but the warp's own and continue across blocks.
// The partial sums are added in shared memory in a fixed order: results do not depend on timing, nor does a row on the
// other rows.
//
// With `direct` each warp has 16 rows of the weight and loads them into registers, `depth` steps ahead, while x stands in
// shared memory. So more warps run on a multiprocessor, which pays where a weight's numbers take instructions to become
// plain. Each CTA has one block, and the warps_k warps of a row divide K into as many parts; prefetch_bytes of each part
// beyond its first steps are prefetched.
//
// The scale of a whole row multiplies the row's sum at the end. The scale of a group multiplies the group's sum, from
// which the zero point times the sum of x has been subtracted. So a scale is never rounded.
//
// With `pdl` the launch may begin while the preceding kernel of the stream is still running. The weight, norm_weight
// and bias are read at once, and must have been written before that kernel; x, residual and out are accessed
// only after it has ended.
#pragma once

#include "fenceline/common.h"

namespace fenceline {

constexpr int kMaxSkinnyRows = 16;
constexpr int kMaxDirectWarps = 12;  // of a CTA

// How the weight is stored. A group: the numbers along K that have a scale in common.
enum class Numbers {
  kBf16,
  kFp8,         // E4M3, a scale for each row
  kFp8Groups,   // E4M3, groups of 128
  kInt4,        // groups of 128, with zero points
  kInt4Groups,  // groups of 64 or 32
};

constexpr bool is_fp8(Numbers n) { return n == Numbers::kFp8 || n == Numbers::kFp8Groups; }
constexpr bool is_int4(Numbers n) { return n == Numbers::kInt4 || n == Numbers::kInt4Groups; }
constexpr uint32_t bits_of(Numbers n) { return is_int4(n) ? 4 : is_fp8(n) ? 8 : 16; }
// Elements of K that a warp takes at a time: 128 bytes of each row of the weight.
constexpr uint32_t step_of(Numbers n) { return 1024 / bits_of(n); }
// The same with `direct`: 64 bytes of each row.
constexpr uint32_t direct_step_of(Numbers n) { return step_of(n) / 2; }
// The groups with scales of their own that a warp takes at a time; of a group of 64 each half counts as one.
constexpr uint32_t scales_of(Numbers n) {
  return n == Numbers::kFp8Groups ? 1 : n == Numbers::kInt4 ? 2 : n == Numbers::kInt4Groups ? 8 : 0;
}

// Part of the C ABI: python/fenceline_kernel/skinny.py mirrors it.
struct SkinnyGemmRequest {
  const void* x;            // [rows, k] contiguous, 16-byte aligned
  const void* weight;       // [num_out, k] or [2 * num_out, k] numbers, contiguous, 16-byte aligned
  const void* norm_weight;  // [k] 16-byte aligned, or null
  const void* bias;         // [num_out] or [2 * num_out], or null
  const void* residual;     // [rows, num_out] contiguous, or null
  void* out;                // [rows, num_out] contiguous
  const void* scales;       // float32, [groups along K][rows of the weight] contiguous; null for bfloat16
  const void* zeros;        // uint8, as scales, 4-byte aligned, for int4; else null
  int32_t rows;
  int32_t num_out;
  int32_t k;                // a multiple of 8; of 16 for fp8, of the group for int4
  float eps;
  int32_t gated;            // 1 or 0
  int32_t tiles;            // of 8 weight rows for each warp: 2, 4, or for some numbers and rows 3 or 6 (see the check)
  int32_t warps_n;
  int32_t warps_k;          // warps_n * warps_k <= 16
  int32_t depth;            // 2, 3, 4 or 6 stages in flight
  int32_t cluster;          // CTAs along K: 1, 2, 4 or 8 (sm_90 on)
  int32_t num_ctas;         // upper bound of the grid, a multiple of cluster; 0: one block of rows for each CTA
  int32_t prefetch_bytes;   // of each row of the CTA's first block, beyond the ring, prefetched into L2 (sm_90 on)
  int32_t pdl;              // 1 or 0 (sm_90 on)
  int32_t direct;           // 1 or 0: see above; for some numbers, up to 8 rows, 2 tiles, depth 2 or 4, no cluster
  int32_t bits;             // of a number: 16 for bfloat16, 8 for E4M3, 4 for whole numbers
  int32_t group;            // numbers along K for each scale: 0 (a whole row) or 128 for fp8, 32, 64 or 128 for int4
};
static_assert(sizeof(SkinnyGemmRequest) == 128, "mirrored in Python");

// The kernel's argument, passed by value.
struct SkinnyGemmParams {
  const char* x;
  const char* weight;
  const char* norm_weight;
  const uint16_t* bias;
  const uint16_t* residual;
  uint16_t* out;
  const float* scales;
  const char* zeros;
  uint32_t rows, num_out, k;
  float eps;
  uint32_t gated, warps_k, depth, cluster;
  uint32_t block_rows;   // of the weight: warps_n * tiles * 8
  uint32_t sum_stride;   // floats from one row of partial sums to the next, so that rows use different banks
  uint32_t num_blocks;
  uint32_t steps;        // for each warp and block
  uint32_t stage_bytes;  // for each warp: the weight, x, norm_weight, scales and zeros of a step
  uint32_t prefetch_bytes;
  uint32_t row_units;    // 16 bytes each, of a row of the weight
  uint32_t weight_rows;
  uint32_t group_shift;  // log2 of the group
  uint32_t x_row_bytes;  // of a row of x in shared memory, with `direct`; rows begin at different banks
};

inline Numbers numbers_of(const SkinnyGemmRequest& r) {
  if (r.bits == 16) return Numbers::kBf16;
  if (r.bits == 8) return r.group == 0 ? Numbers::kFp8 : Numbers::kFp8Groups;
  return r.group == 128 ? Numbers::kInt4 : Numbers::kInt4Groups;
}

// What a request with `direct` needs beside the rest; null if it has all.
inline const char* check_direct(const SkinnyGemmRequest& r) {
  const Numbers numbers = numbers_of(r);
  if (numbers != Numbers::kFp8 && numbers != Numbers::kInt4) return "skinny_gemm has no direct kernel for such numbers";
  if (r.rows > 8 || r.tiles != 2) return "a direct skinny_gemm takes up to 8 rows, and 2 tiles";
  if (r.depth != 2 && r.depth != 4) return "a direct skinny_gemm takes 2 or 4 stages";
  if (r.cluster != 1 || r.num_ctas != 0) return "a direct skinny_gemm has no clusters, and a CTA for each block";
  if (r.warps_n * r.warps_k > kMaxDirectWarps) return "a direct skinny_gemm takes 1 to 12 warps";
  if (r.k % static_cast<int32_t>(direct_step_of(numbers)) != 0) {
    return "a direct skinny_gemm needs k a multiple of 64 for fp8, of 128 for int4";
  }
  return nullptr;
}

// Returns null, or what is wrong with the request.
inline const char* check_skinny_gemm(const SkinnyGemmRequest& r) {
  if (r.rows < 1 || r.rows > kMaxSkinnyRows) return "skinny_gemm takes 1 to 16 rows";
  const bool known_group = r.bits == 4 ? r.group == 32 || r.group == 64 || r.group == 128
                                       : r.group == 0 || (r.bits == 8 && r.group == 128);
  if ((r.bits != 16 && r.bits != 8 && r.bits != 4) || !known_group) return "skinny_gemm has no such numbers or groups";
  const bool few = r.rows <= 8, groups = r.bits == 4 && r.group < 128;
  const bool known_tiles = r.tiles == 2 || r.tiles == 4 || (r.tiles == 3 && few && r.bits == 16) ||
                           (r.tiles == 6 && (r.bits == 16 || (few && !groups)));
  if (!known_tiles) {
    return "skinny_gemm takes 2 or 4 tiles for each warp; 6 for bfloat16, and for up to 8 rows unless int4 has groups of "
           "less than 128; 3 for up to 8 rows of bfloat16";
  }
  if (r.k < 8 || r.k % 8 != 0 || r.num_out < 1) return "skinny_gemm needs k a multiple of 8 and an output";
  if (r.bits == 8 && r.k % 16 != 0) return "skinny_gemm needs k a multiple of 16 for fp8";
  if (r.bits == 4 && (r.k % r.group != 0 || r.num_out % 8 != 0)) {
    return "skinny_gemm needs k a multiple of the group and outputs a multiple of 8 for int4";
  }
  if ((r.bits == 16) != (r.scales == nullptr) || (r.bits == 4) != (r.zeros != nullptr)) {
    return "skinny_gemm needs scales for fp8, scales and zeros for int4";
  }
  if ((reinterpret_cast<uintptr_t>(r.scales) | reinterpret_cast<uintptr_t>(r.zeros)) & 3) {
    return "skinny_gemm needs scales and zeros aligned to 4 bytes";
  }
  if ((reinterpret_cast<uintptr_t>(r.x) | reinterpret_cast<uintptr_t>(r.weight) |
       reinterpret_cast<uintptr_t>(r.norm_weight)) & 15) return "skinny_gemm needs operands aligned to 16 bytes";
  if (r.warps_n < 1 || r.warps_k < 1 || r.warps_n * r.warps_k > 16) return "skinny_gemm takes 1 to 16 warps";
  if (r.gated && r.warps_n * r.tiles % 2 != 0) return "a gated block has an even number of tiles";
  if (r.gated && r.residual != nullptr) return "a gated product has no residual";
  if (r.depth != 2 && r.depth != 3 && r.depth != 4 && r.depth != 6) return "skinny_gemm takes 2, 3, 4 or 6 stages";
  if (r.cluster != 1 && r.cluster != 2 && r.cluster != 4 && r.cluster != 8) return "a cluster has 1, 2, 4 or 8 CTAs";
  if (r.num_ctas % r.cluster != 0 || r.num_ctas < 0) return "num_ctas is no multiple of the cluster";
  if (r.direct) {
    if (const char* wrong = check_direct(r)) return wrong;
  }
  const int64_t weight_rows = int64_t{r.num_out} * (r.gated ? 2 : 1);
  if (weight_rows * (int64_t{r.k} * r.bits / 128) >= (int64_t{1} << 32)) return "the weight is too large for skinny_gemm";
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
  const Numbers numbers = numbers_of(r);
  const uint32_t tiles = static_cast<uint32_t>(r.tiles), step = step_of(numbers) * p.warps_k * p.cluster;
  p.steps = (p.k + step - 1) / step;
  if (r.direct) p.steps = (p.k / direct_step_of(numbers) + p.warps_k - 1) / p.warps_k;
  p.stage_bytes = tiles * 1024 + (p.rows + (r.norm_weight != nullptr ? 1 : 0)) * step_of(numbers) * 2;
  p.stage_bytes += scales_of(numbers) * tiles * 8 * (is_int4(numbers) ? 5 : 4);
  p.prefetch_bytes = static_cast<uint32_t>(r.prefetch_bytes) & ~15u;
  p.scales = static_cast<const float*>(r.scales);
  p.zeros = static_cast<const char*>(r.zeros);
  p.row_units = p.k * bits_of(numbers) / 128;
  p.weight_rows = p.num_out << p.gated;
  p.x_row_bytes = p.k * 2 + 64;
  p.group_shift = r.group == 32 ? 5 : r.group == 64 ? 6 : 7;
  return p;
}

// Rings of all warps, then the partial sums [warps_k][rows][sum_stride], then those of the squares [warps_k][rows].
inline uint32_t skinny_ring_bytes(const SkinnyGemmParams& p, uint32_t num_warps) {
  return num_warps * p.depth * p.stage_bytes;
}

inline uint32_t skinny_shared_bytes(const SkinnyGemmParams& p, uint32_t num_warps) {
  return skinny_ring_bytes(p, num_warps) + p.warps_k * p.rows * (p.sum_stride + 1) * 4;
}

// With `direct`: x; the partial sums as above; for each step and 8 rows the sums of
// x and of its squares; what each row is multiplied with because of the norm.
inline uint32_t direct_shared_bytes(const SkinnyGemmParams& p, Numbers numbers) {
  const uint32_t num_steps = p.k / direct_step_of(numbers);
  return p.rows * p.x_row_bytes + (p.warps_k * p.rows * p.sum_stride + num_steps * 16 + 8) * 4;
}

// The shared memory of a CTA.
inline uint32_t shared_bytes(const SkinnyGemmRequest& r, const SkinnyGemmParams& p) {
  if (r.direct) return direct_shared_bytes(p, numbers_of(r));
  return skinny_shared_bytes(p, static_cast<uint32_t>(r.warps_n * r.warps_k));
}

}  // namespace fenceline
