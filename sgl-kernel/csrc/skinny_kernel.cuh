// The skinny GEMM's algorithm (see fenceline/skinny_gemm.h). It uses the functions of skinny_device.cuh, which must be
// included before this file.
#pragma once

#include "fenceline/skinny_gemm.h"
#include "skinny_numbers.cuh"

namespace fenceline {

// kRowTiles: groups of 8 rows of x (1 or 2); kTiles: groups of 8 rows of the weight for each warp.
//
// Lane (g, t) = (lane / 4, lane % 4) holds row g of a tile and elements 8 t to 8 t + 7 of 32. The tensor core expects
// elements 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of 16 there. Since x and the weight are permuted in the same way, the sum is
// the same. All copies have 16 bytes. For E4M3 and whole numbers these are more than 8 elements, so other lanes
// multiply some of them. Eight lanes then copy the 128 bytes of a row, and its pieces of 16 bytes change places in
// shared memory (`swizzle`), so that neither these stores nor the loads of 8 or 4 bytes for each lane use a bank twice.
//
// In a product on the tensor core, two tiles of the weight are the 16 rows and 8 rows of x are the columns.
template <Numbers kNumbers, int kRowTiles, int kTiles, bool kNorm>
class SkinnyGemm {
  static constexpr bool kIsFp8 = is_fp8(kNumbers), kIsInt4 = is_int4(kNumbers);
  static constexpr uint32_t kBits = bits_of(kNumbers);
  static constexpr uint32_t kStepK = step_of(kNumbers);
  static constexpr uint32_t kPieces = kStepK / 32;  // of 8 elements of x, for each lane and step
  static constexpr uint32_t kUnits = kPieces * 4;   // of 16 bytes, of a row of x for each step: at most 32
  static constexpr int kPairs = (kTiles + 1) / 2;  // of tiles
  static constexpr uint32_t kScales = scales_of(kNumbers);
  static constexpr uint32_t kScaleK = kScales > 0 ? kStepK / kScales : kStepK;  // elements with one scale
  static constexpr uint32_t kScaleRows = kTiles * 8;                            // for each warp
  static constexpr bool kQuantized = kNumbers != Numbers::kBf16;
  static constexpr bool kShared = kNorm || kQuantized;  // lanes read what others of the warp have copied
  static constexpr int kTileCopies = kQuantized ? 2 : 1;  // rows of a tile of which a lane copies a part
  using Sums = float[kPairs][kRowTiles][4];

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
    first_k = rank * p.steps * p.warps_k * kStepK + warp_k * kStepK;
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
  __device__ __forceinline__ uint32_t step_k() const { return p.warps_k * kStepK; }

  __device__ __forceinline__ uint32_t weight_row(uint32_t block, uint32_t row) const {
    const uint32_t half = p.block_rows >> p.gated;
    const bool up = row >= half;  // never, unless gated
    const uint32_t out = block * half + row - (up ? half : 0);
    return min(out, p.num_out - 1) + (up ? p.num_out : 0);  // rows past the end repeat the last, and are not stored
  }

  __device__ __forceinline__ void locate_rows(uint32_t block) {
#pragma unroll
    for (int i = 0; i < kTiles * kTileCopies; ++i) {
      const uint32_t row = kQuantized ? i * 4 + g / 2 : i * 8 + g;
      row_units[i] = weight_row(block, warp_n * kTiles * 8 + row) * p.row_units;
    }
    if (kScales > 0) {
      const uint32_t first = warp_n * kScaleRows, lane = g * 4 + t;
#pragma unroll
      for (uint32_t i = 0; i < kScaleRows; i += 32) scale_rows[i / 32] = weight_row(block, first + min(lane + i, kScaleRows - 1));
      if (kIsInt4) zero_row = weight_row(block, first + min(lane * 4, kScaleRows - 1)) & ~3u;
    }
  }

  // In shared memory `row` has eight places of 16 bytes. This is the place of its first 16 bytes; piece i is at place
  // i xor this number.
  static __device__ __forceinline__ uint32_t swizzle(uint32_t row) { return (row << 1 | row >> 2) & 7; }

  __device__ __forceinline__ void copy_weights(uint32_t stage, uint32_t k) const {
    constexpr uint32_t kQuarter = 128 / kBits;  // elements in 16 bytes
    const char* first = p.weight + k / 8 * kBits;
    if constexpr (kQuantized) {
      const uint32_t piece = (g * 4 + t) % 8;
      const bool live = k + piece * kQuarter < p.k;
#pragma unroll
      for (int i = 0; i < kTiles * 2; ++i) {
        const uint32_t row = i % 2 * 4 + g / 2, to = stage + i / 2 * 1024 + row * 128 + (piece ^ swizzle(row)) * 16;
        copy_weight_async(to, first + piece * 16 + (static_cast<uint64_t>(row_units[i]) << 4), live, policy);
      }
    } else {
      const uint32_t to = stage + (g * 4 + t) * 16;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const char* from = first + t * 16 + (static_cast<uint64_t>(row_units[i]) << 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy_weight_async(to + i * 1024 + half * 512, from + half * 64, k + (half * 4 + t) * kQuarter < p.k, policy);
        }
      }
    }
    if (kNorm) {
      const uint32_t unit = g * 4 + t;
      if (unit < kUnits) {
        copy_async(stage + kTiles * 1024 + p.rows * kUnits * 16 + unit * 16, p.norm_weight + 2 * (k + unit * 8),
                   k + unit * 8 < p.k);
      }
    }
    if (kScales > 0) copy_scales(stage, k);
  }

  __device__ __forceinline__ uint32_t scale_offset() const { return kTiles * 1024 + (p.rows + (kNorm ? 1 : 0)) * kPieces * 64; }

  __device__ __forceinline__ void copy_scales(uint32_t stage, uint32_t k) const {
    const uint32_t lane = g * 4 + t, to = stage + scale_offset();
#pragma unroll
    for (uint32_t slot = 0; slot < kScales; ++slot) {
      const uint32_t at = k + slot * kScaleK;
      const bool live = at < p.k;
      const uint64_t group = static_cast<uint64_t>(at >> p.group_shift) * p.weight_rows;
#pragma unroll
      for (uint32_t i = 0; i < kScaleRows; i += 32) {
        if (lane + i < kScaleRows) {
          copy_word_async(to + (slot * kScaleRows + lane + i) * 4, live ? p.scales + group + scale_rows[i / 32] : p.scales, live);
        }
      }
      if (kIsInt4 && lane < kScaleRows / 4) {
        copy_word_async(to + kScales * kScaleRows * 4 + slot * kScaleRows + lane * 4,
                        live ? p.zeros + group + zero_row : p.zeros, live);
      }
    }
  }

  __device__ __forceinline__ void copy_x(uint32_t stage, uint32_t k) const {
    if constexpr (!kQuantized) {  // a lane copies what it multiplies
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const uint32_t row = i * 8 + g;
        if (row < p.rows) {
          const char* from = p.x + 2 * (static_cast<uint64_t>(row) * p.k + k + t * 8);
#pragma unroll
          for (uint32_t piece = 0; piece < kPieces; ++piece) {
            copy_async(stage + kTiles * 1024 + (piece * p.rows + row) * 64 + t * 16, from + piece * 64,
                       k + piece * 32 + t * 8 < p.k);
          }
        }
      }
      return;
    }
    const uint32_t unit = (g * 4 + t) % kUnits, piece = unit / 4;
    const bool live = k + unit * 8 < p.k;
#pragma unroll 1
    for (uint32_t row = (g * 4 + t) / kUnits; row < p.rows; row += 32 / kUnits) {
      copy_async(stage + kTiles * 1024 + (piece * p.rows + row) * 64 + unit % 4 * 16,
                 p.x + 2 * (static_cast<uint64_t>(row) * p.k + k + unit * 8), live);
    }
  }

  // Loads the next stage into the ring; does nothing after the last block.
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
    const uint32_t bytes = min((end - from) / 8 * kBits, p.prefetch_bytes);
    for (uint32_t row = threadIdx.x; row < p.block_rows; row += blockDim.x) {
      const uint64_t units = static_cast<uint64_t>(weight_row(first_block, row)) * p.row_units;
      prefetch_l2(p.weight + (units << 4) + from / 8 * kBits, bytes);
    }
  }

  __device__ __forceinline__ void run_block(uint32_t block) {
    const bool first = block == first_block;
    const Early early = load_early(block);
    Sums acc = {};
    float square[kRowTiles] = {};
    for (uint32_t step = 0; step < p.steps; ++step) {
      wait_for_oldest(p.depth);
      if (kShared) __syncwarp();
      if (kNorm && first && warp_n == 0) add_squares(ring + slot * p.stage_bytes, square);
      multiply_stage(ring + slot * p.stage_bytes, acc);
      if (kShared) __syncwarp();  // the other lanes have read what this one will overwrite
      copy_stage(ring + slot * p.stage_bytes);
      commit_copies();
      slot = slot + 1 == p.depth ? 0 : slot + 1;
    }
    store_partial_sums(acc, square, kNorm && first && warp_n == 0);
    __syncthreads();
    if (p.cluster > 1) join_cluster();
    write_block(block, early);
    if (p.cluster > 1) cluster_barrier();  // until the other CTAs have read this CTA's sums
    __syncthreads();
  }

  __device__ __forceinline__ void add_squares(uint32_t stage, float (&square)[kRowTiles]) const {
#pragma unroll 1
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) square[i] += sum_of_squares(load_x(stage, piece, i));
    }
  }

  // No branches: a warp then waits for few of its loads from shared memory at a time.
  __device__ __forceinline__ void multiply_stage(uint32_t stage, Sums& acc) const {
    Sums part = {};                     // of a group
    float x_sums[kRowTiles][4] = {};    // of a group, for columns 2 t and 2 t + 1
    Sums& sums_of_products = kScales > 0 ? part : acc;
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      uint4 x[kRowTiles];
      uint4 norm = make_uint4(0, 0, 0, 0);
      if (kNorm) norm = load_shared(stage + kTiles * 1024 + (p.rows * kPieces + piece) * 64 + t * 16);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        x[i] = load_x(stage, piece, i);
        if (kNorm) x[i] = times(x[i], norm);  // the division by the size of the row comes last
        if (kIsFp8) x[i] = pair_for_fp8(x[i]);
        if (kIsInt4) {
          multiply(x_sums[i], kOnes, kOnes, kOnes, kOnes, x[i].x, x[i].y);
          multiply(x_sums[i], kOnes, kOnes, kOnes, kOnes, x[i].z, x[i].w);
        }
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint4 top = load_numbers(stage, pair * 2, piece);
        const uint4 bottom = pair * 2 + 1 < kTiles ? load_numbers(stage, pair * 2 + 1, piece) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          multiply(sums_of_products[pair][i], top.x, bottom.x, top.y, bottom.y, x[i].x, x[i].y);
          multiply(sums_of_products[pair][i], top.z, bottom.z, top.w, bottom.w, x[i].z, x[i].w);
        }
      }
      constexpr uint32_t kGroupPieces = kScaleK / 32;
      if (kScales > 0 && piece % kGroupPieces == kGroupPieces - 1) {
        add_group(stage + scale_offset(), piece / kGroupPieces, acc, part, x_sums);
#pragma unroll
        for (int i = 0; i < kRowTiles * 4; ++i) {
          x_sums[i / 4][i % 4] = 0;
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) part[pair][i / 4][i % 4] = 0;
        }
      }
    }
  }

  // This lane's numbers of a tile that are multiplied with its elements of `piece`, as eight bfloat16.
  __device__ __forceinline__ uint4 load_numbers(uint32_t stage, uint32_t tile, uint32_t piece) const {
    const uint32_t from = stage + tile * 1024 + g * 128;
    if constexpr (kIsInt4) {
      const uint32_t word = load_shared_word(from + ((swizzle(g) ^ piece) * 16) + t * 4);
      return make_uint4(int4_pair(word), int4_pair(word >> 4), int4_pair(word >> 8), int4_pair(word >> 12));
    } else if constexpr (kIsFp8) {
      const uint2 words = load_shared_words(from + ((swizzle(g) ^ t / 2 ^ piece * 2) * 16) + t % 2 * 8);
      return make_uint4(even_fp8(words.x), odd_fp8(words.x), even_fp8(words.y), odd_fp8(words.y));
    } else {
      return load_shared(stage + tile * 1024 + piece * 512 + (g * 4 + t) * 16);
    }
  }

  // This lane's elements of `piece`. Past the last row of x that row is repeated; the sums are not stored.
  __device__ __forceinline__ uint4 load_x(uint32_t stage, uint32_t piece, int row_tile) const {
    return load_shared(stage + kTiles * 1024 + (piece * p.rows + min(row_tile * 8 + g, p.rows - 1)) * 64 + t * 16);
  }

  // acc += scale * (part - zero * x_sums) for the group in `slot`, since its numbers are too large by `zero`.
  __device__ __forceinline__ void add_group(uint32_t scales, uint32_t slot, Sums& acc, const Sums& part,
                                            const float (&x_sums)[kRowTiles][4]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint32_t row = slot * kScaleRows + tile * 8 + g;
      const float scale = as_float(load_shared_word(scales + row * 4));
      const float zero = kIsInt4 ? int4_zero(load_shared_byte(scales + kScales * kScaleRows * 4 + row)) : 0.0f;
#pragma unroll
      for (int i = 0; i < kRowTiles * 2; ++i) {
        const int at = tile % 2 * 2 + i % 2;
        float sum = part[tile / 2][i / 2][at];
        if (kIsInt4) sum = fmaf(-zero, x_sums[i / 2][i % 2], sum);
        acc[tile / 2][i / 2][at] = fmaf(scale, sum, acc[tile / 2][i / 2][at]);
      }
    }
  }

  __device__ __forceinline__ void store_partial_sums(const Sums& acc, const float (&square)[kRowTiles], bool with_squares) {
    float* to = sums + warp_k * p.rows * p.sum_stride + warp_n * kTiles * 8 + g;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const uint32_t row = i * 8 + t * 2 + column;
        if (row < p.rows) {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            to[row * p.sum_stride + tile * 8] = acc[tile / 2][i][tile % 2 * 2 + column];
          }
        }
      }
      if (with_squares) {
        const uint32_t row = i * 8 + g;
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

  // What a thread's first output of a block is multiplied with, and the residual; loaded before the sums are known.
  struct Early {
    float residual = 0, scale = 0, up_scale = 0;
  };

  // Thread index % (cluster * threads) writes output `index` of a block, counted over [rows][outputs of the block].
  __device__ __forceinline__ Early load_early(uint32_t block) const {
    const uint32_t outs = p.block_rows >> p.gated, index = rank * blockDim.x + threadIdx.x;
    const uint32_t row = index / outs, n = block * outs + index % outs;
    Early early;
    if (row < p.rows && n < p.num_out) {
      if (p.residual != nullptr) early.residual = widen(p.residual[static_cast<uint64_t>(row) * p.num_out + n]);
      load_row_scales(n, early);
    }
    return early;
  }

  __device__ __forceinline__ void load_row_scales(uint32_t n, Early& early) const {
    if (kNumbers == Numbers::kFp8) {
      early.scale = p.scales[n];
      if (p.gated) early.up_scale = p.scales[p.num_out + n];
    }
  }

  __device__ __forceinline__ void write_block(uint32_t block, Early early) const {
    const uint32_t outs = p.block_rows >> p.gated;
    for (uint32_t index = rank * blockDim.x + threadIdx.x; index < p.rows * outs; index += p.cluster * blockDim.x) {
      const uint32_t row = index / outs, column = index % outs, n = block * outs + column;
      if (n >= p.num_out) continue;
      const bool first = index < p.cluster * blockDim.x;
      const float* from = sums + row * p.sum_stride + column;
      float y = total(from, p.rows * p.sum_stride);
      float up = p.gated ? total(from + outs, p.rows * p.sum_stride) : 0.0f;
      if (kIsFp8) {
        y *= as_float(kLargeFloat);
        up *= as_float(kLargeFloat);
      }
      if (kNumbers == Numbers::kFp8) {
        if (!first) load_row_scales(n, early);
        y *= early.scale;
        up *= early.up_scale;
      }
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
      if (p.residual != nullptr) y += first ? early.residual : widen(p.residual[at]);
      p.out[at] = narrow(y);
    }
  }

  const SkinnyGemmParams& p;
  uint32_t g, t, warp_k, warp_n, rank, first_block, stride;
  uint32_t ring, slot = 0;  // shared address of this warp's stages, and the one to consume next
  float* sums;
  float* squares;
  uint32_t first_k;  // of this warp in step 0
  uint64_t policy;
  uint32_t fill_block, fill_step;  // the stage to load next
  uint32_t row_units[kTiles * kTileCopies];  // weight rows of fill_block, in units of 16 bytes from its start
  uint32_t scale_rows[(kScaleRows + 31) / 32];  // whose scales and zero points this lane copies
  uint32_t zero_row;
  bool squares_joined = false;
};

}  // namespace fenceline
