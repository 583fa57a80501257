// The skinny GEMM's algorithm (see fenceline/skinny_gemm.h), in terms of the functions of skinny_device.cuh, which must be
// included before this file.
#pragma once

#include "fenceline/skinny_gemm.h"

namespace fenceline {

__device__ __forceinline__ float low(uint32_t pair) { return as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(uint16_t v) { return as_float(static_cast<uint32_t>(v) << 16); }

__device__ __forceinline__ float sum_of_squares(const uint4& v) {
  float sum = low(v.x) * low(v.x);
  sum = fmaf(high(v.x), high(v.x), sum);
  sum = fmaf(low(v.y), low(v.y), sum);
  sum = fmaf(high(v.y), high(v.y), sum);
  sum = fmaf(low(v.z), low(v.z), sum);
  sum = fmaf(high(v.z), high(v.z), sum);
  sum = fmaf(low(v.w), low(v.w), sum);
  return fmaf(high(v.w), high(v.w), sum);
}

__device__ __forceinline__ uint4 times(const uint4& a, const uint4& b) {
  return make_uint4(multiply_pairs(a.x, b.x), multiply_pairs(a.y, b.y), multiply_pairs(a.z, b.z), multiply_pairs(a.w, b.w));
}

// kRowTiles: groups of 8 rows of x (1 or 2); kTiles: groups of 8 rows of the weight for each warp.
//
// Lane (g, t) = (lane / 4, lane % 4) holds row g of a tile and elements 8 t to 8 t + 7 of 32. The tensor core expects
// elements 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16 there. Since x and the weight are permuted in the same way, the sum is the
// same, and every access has 16 bytes.
template <int kRowTiles, int kTiles, bool kNorm>
class SkinnyGemm {
 public:
  __device__ __forceinline__ SkinnyGemm(const SkinnyGemmParams& params, char* shared) : p(params) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    g = lane / 4;
    t = lane % 4;
    warp_k = warp % p.warps_k;
    warp_n = warp / p.warps_k;
    rank = blockIdx.x % p.cluster;
    first_block = blockIdx.x / p.cluster;
    stride = gridDim.x / p.cluster;
    const uint32_t ring_bytes = p.depth * p.stage_bytes;
    ring = shared_address(shared) + warp * ring_bytes;
    sums = reinterpret_cast<float*>(shared + num_warps * ring_bytes);
    squares = sums + p.warps_k * p.rows * p.sum_stride;
    first_k = rank * p.steps * p.warps_k * kSkinnyStepK + warp_k * kSkinnyStepK + t * 8;
    policy = evict_first_policy();
  }

  __device__ __forceinline__ void run() {
    fill_block = first_block;
    locate_rows(fill_block);
    // No kernel writes the weights, so they are loaded while the preceding kernel is still running.
    for (uint32_t i = 0, k = first_k; i < p.depth; ++i, k += step_k()) {
      if (i < p.steps) copy_weights(ring + i * p.stage_bytes, k);
    }
    commit_copies();
    prefetch_first_block();
    let_next_kernel_start();
    wait_for_previous_kernel();
    // Past the end of a block the ring continues with the next one.
    fill_step = min(p.depth, p.steps);
    if (fill_step == p.steps) start_fill_block();
    for (uint32_t i = 0; i < p.depth; ++i) {
      const uint32_t stage = ring + i * p.stage_bytes;
      if (i < p.steps) {
        copy_x(stage, first_k + i * step_k());
      } else {
        copy_stage(stage);
      }
      commit_copies();
    }
    for (uint32_t block = first_block; block < p.num_blocks; block += stride) run_block(block);
  }

 private:
  __device__ __forceinline__ uint32_t step_k() const { return p.warps_k * kSkinnyStepK; }

  __device__ __forceinline__ uint32_t weight_row(uint32_t block, uint32_t row) const {
    const uint32_t half = p.block_rows >> p.gated;
    const bool up = row >= half;  // never, unless gated
    const uint32_t out = block * half + row - (up ? half : 0);
    return min(out, p.num_out - 1) + (up ? p.num_out : 0);  // rows past the end repeat the last, and are not stored
  }

  __device__ __forceinline__ void locate_rows(uint32_t block) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) row_units[i] = weight_row(block, (warp_n * kTiles + i) * 8 + g) * (p.k / 8);
  }

  __device__ __forceinline__ void copy_weights(uint32_t stage, uint32_t k) const {
    const uint32_t to = stage + (g * 4 + t) * 16;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const char* from = p.weight + (static_cast<uint64_t>(row_units[i]) << 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool live = k + half * 32 < p.k;
        copy_weight_async(to + i * 1024 + half * 512, live ? from + 2 * (k + half * 32) : p.weight, live, policy);
      }
    }
    if (kNorm && g == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool live = k + half * 32 < p.k;
        copy_async(stage + kTiles * 1024 + p.rows * 128 + half * 64 + t * 16,
                   live ? p.norm_weight + 2 * (k + half * 32) : p.norm_weight, live);
      }
    }
  }

  __device__ __forceinline__ void copy_x(uint32_t stage, uint32_t k) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const uint32_t row = i * 8 + g;
      if (row < p.rows) {
        const uint32_t to = stage + kTiles * 1024 + row * 64 + t * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool live = k + half * 32 < p.k;
          copy_async(to + half * p.rows * 64, live ? p.x + 2 * (static_cast<uint64_t>(row) * p.k + k + half * 32) : p.x, live);
        }
      }
    }
  }

  // Loads the next stage into the ring; nothing after the last block.
  __device__ __forceinline__ void copy_stage(uint32_t stage) {
    if (fill_block < p.num_blocks) {
      const uint32_t k = first_k + fill_step * step_k();
      copy_weights(stage, k);
      copy_x(stage, k);
      if (++fill_step == p.steps) start_fill_block();
    }
  }

  __device__ __forceinline__ void start_fill_block() {
    fill_step = 0;
    fill_block += stride;
    if (fill_block < p.num_blocks) locate_rows(fill_block);
  }

  __device__ __forceinline__ void prefetch_first_block() const {
    const uint32_t range = p.steps * step_k();
    const uint32_t from = rank * range + min(p.depth, p.steps) * step_k(), end = min(p.k, (rank + 1) * range);
    if (p.prefetch_bytes == 0 || from >= end) return;
    const uint32_t bytes = min(2 * (end - from), p.prefetch_bytes);
    for (uint32_t row = threadIdx.x; row < p.block_rows; row += blockDim.x) {
      prefetch_l2(p.weight + 2 * (static_cast<uint64_t>(weight_row(first_block, row)) * p.k + from), bytes);
    }
  }

  __device__ __forceinline__ void run_block(uint32_t block) {
    const bool first = block == first_block;
    const float residual = early_residual(block);
    float acc[kTiles][4] = {};
    float square[kRowTiles] = {};
    for (uint32_t step = 0; step < p.steps; ++step) {
      wait_for_oldest(p.depth);
      if (kNorm) __syncwarp();  // norm_weight was copied by other lanes
      multiply_stage(ring + slot * p.stage_bytes, acc, square, kNorm && first && warp_n == 0);
      if (kNorm) __syncwarp();  // the other lanes have read it
      copy_stage(ring + slot * p.stage_bytes);
      commit_copies();
      slot = slot + 1 == p.depth ? 0 : slot + 1;
    }
    store_partial_sums(acc, square, kNorm && first && warp_n == 0);
    __syncthreads();
    if (p.cluster > 1) join_cluster();
    write_block(block, residual);
    if (p.cluster > 1) cluster_barrier();  // until the other CTAs have read this CTA's sums
    __syncthreads();
  }

  __device__ __forceinline__ void multiply_stage(uint32_t stage, float (&acc)[kTiles][4],
                                                 float (&square)[kRowTiles], bool with_squares) const {
    const uint32_t mine = stage + (g * 4 + t) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 x[kRowTiles];
      uint4 norm = make_uint4(0, 0, 0, 0);
      if (kNorm) norm = load_shared(stage + kTiles * 1024 + p.rows * 128 + half * 64 + t * 16);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        x[i] = make_uint4(0, 0, 0, 0);
        const uint32_t row = i * 8 + g;
        if (row < p.rows) x[i] = load_shared(stage + kTiles * 1024 + (half * p.rows + row) * 64 + t * 16);
        if (kNorm) {
          if (with_squares) square[i] += sum_of_squares(x[i]);
          x[i] = times(x[i], norm);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint4 w = load_shared(mine + i * 1024 + half * 512);
        const uint4 bottom = kRowTiles == 2 ? x[kRowTiles - 1] : make_uint4(0, 0, 0, 0);
        multiply(acc[i], x[0].x, bottom.x, x[0].y, bottom.y, w.x, w.y);
        multiply(acc[i], x[0].z, bottom.z, x[0].w, bottom.w, w.z, w.w);
      }
    }
  }

  __device__ __forceinline__ void store_partial_sums(const float (&acc)[kTiles][4],
                                                     const float (&square)[kRowTiles], bool with_squares) {
    float* to = sums + warp_k * p.rows * p.sum_stride + warp_n * kTiles * 8 + t * 2;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const uint32_t row = i * 8 + g;
      if (row < p.rows) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const float* from = acc[tile] + i * 2;
          *reinterpret_cast<float2*>(to + row * p.sum_stride + tile * 8) = make_float2(from[0], from[1]);
        }
      }
      if (with_squares) {
        float sum = square[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0 && row < p.rows) squares[warp_k * p.rows + row] = sum;
      }
    }
  }

  // Sums each CTA's partial sums over its warps, in place, where the other CTAs then read them.
  __device__ __forceinline__ void join_cluster() {
    const uint32_t size = p.rows * p.sum_stride;
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
      float sum = sums[i];
      for (uint32_t warp = 1; warp < p.warps_k; ++warp) sum += sums[warp * size + i];
      sums[i] = sum;
    }
    if (kNorm && !squares_joined) {
      for (uint32_t row = threadIdx.x; row < p.rows; row += blockDim.x) {
        float sum = squares[row];
        for (uint32_t warp = 1; warp < p.warps_k; ++warp) sum += squares[warp * p.rows + row];
        squares[row] = sum;
      }
      squares_joined = true;
    }
    __syncthreads();
    cluster_barrier();
  }

  __device__ __forceinline__ float total(const float* from, uint32_t size) const {
    float sum = 0;
    if (p.cluster == 1) {
      for (uint32_t warp = 0; warp < p.warps_k; ++warp) sum += from[warp * size];
    } else {
      for (uint32_t cta = 0; cta < p.cluster; ++cta) sum += load_from_cta(from, cta);
    }
    return sum;
  }

  // Output `index` of a block, over [rows][outputs of the block], is thread index % (cluster * threads)'s.
  __device__ __forceinline__ float early_residual(uint32_t block) const {
    const uint32_t outs = p.block_rows >> p.gated, index = rank * blockDim.x + threadIdx.x;
    const uint32_t row = index / outs, n = block * outs + index % outs;
    const bool live = p.residual != nullptr && row < p.rows && n < p.num_out;
    return live ? widen(p.residual[static_cast<uint64_t>(row) * p.num_out + n]) : 0.0f;
  }

  __device__ __forceinline__ void write_block(uint32_t block, float residual) const {
    const uint32_t outs = p.block_rows >> p.gated;
    for (uint32_t index = rank * blockDim.x + threadIdx.x; index < p.rows * outs; index += p.cluster * blockDim.x) {
      const uint32_t row = index / outs, column = index % outs, n = block * outs + column;
      if (n >= p.num_out) continue;
      const float* from = sums + row * p.sum_stride + column;
      float y = total(from, p.rows * p.sum_stride);
      float up = p.gated ? total(from + outs, p.rows * p.sum_stride) : 0.0f;
      if (kNorm) {
        const float scale = rsqrtf(total(squares + row, p.rows) / static_cast<float>(p.k) + p.eps);
        y *= scale;
        up *= scale;
      }
      if (p.bias != nullptr) {
        y += widen(p.bias[n]);
        if (p.gated) up += widen(p.bias[p.num_out + n]);
      }
      if (p.gated) y = y / (1.0f + fast_exp(-y)) * up;
      const uint64_t at = static_cast<uint64_t>(row) * p.num_out + n;
      if (p.residual != nullptr) y += index < p.cluster * blockDim.x ? residual : widen(p.residual[at]);
      p.out[at] = narrow(y);
    }
  }

  const SkinnyGemmParams& p;
  uint32_t g, t, warp_k, warp_n, rank, first_block, stride;
  uint32_t ring, slot = 0;  // shared address of this warp's stages, and the one to consume next
  float* sums;
  float* squares;
  uint32_t first_k;  // of this lane in step 0
  uint64_t policy;
  uint32_t fill_block, fill_step;  // the stage to load next
  uint32_t row_units[kTiles];      // weight rows of fill_block, in units of 16 bytes from the weight's start
  bool squares_joined = false;
};

}  // namespace fenceline
