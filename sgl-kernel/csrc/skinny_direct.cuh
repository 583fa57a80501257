// The skinny GEMM for few rows whose weights go from memory into registers at once (see fenceline/skinny_gemm.h). It
// uses the functions of skinny_device.cuh, which must be included before this file.
#pragma once

#include "fenceline/skinny_gemm.h"
#include "skinny_numbers.cuh"

namespace fenceline {

// Each warp has 16 rows of the weight: with `gated`, 8 gates and the 8 rows that they multiply. A step takes 64 bytes of
// each row: lane (g, t) = (lane / 4, lane % 4) loads 16 bytes of row g and 16 of row g + 8, and multiplies just these.
// So these loads are in flight in registers, kDepth steps of them, and nobody waits for another lane.
//
// x stands in shared memory, multiplied with the norm's weight and as the weight's format wants it. Its pieces of 8
// elements are in the order in which lanes read them: of a step, piece j of lane t is at place j * 4 + t.
template <Numbers kNumbers, int kDepth, bool kNorm>
class DirectGemm {
  static constexpr bool kIsFp8 = is_fp8(kNumbers), kIsInt4 = is_int4(kNumbers);
  static_assert(kNumbers == Numbers::kFp8 || kNumbers == Numbers::kInt4, "with a scale for a row, or for each step");
  static constexpr uint32_t kStepK = direct_step_of(kNumbers);
  static constexpr uint32_t kPieces = kStepK / 32;  // of 8 elements, for each lane and step
  static constexpr uint32_t kUnits = kStepK / 8;    // pieces of a step, of one row of x
  static constexpr int kLoads = 4;                  // of x, in flight for each thread

  // What a lane loads of a step.
  struct Loaded {
    uint4 top, bottom;
    float top_scale, bottom_scale;
    uint32_t top_zero, bottom_zero;
  };

 public:
  __device__ __forceinline__ DirectGemm(const SkinnyGemmParams& params, char* memory) : p(params), shared(memory) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    g = lane / 4;
    t = lane % 4;
    warp_k = warp % p.warps_k;
    warp_n = warp / p.warps_k;
    const uint32_t unit = blockIdx.x * (p.block_rows / 16) + warp_n;
    top_row = min(unit * (16 >> p.gated) + g, p.num_out - 1);  // rows past the end repeat the last, and are not stored
    bottom_row = p.gated ? p.num_out + top_row : min(unit * 16 + 8 + g, p.num_out - 1);
    first_step = min(warp_k * p.steps, p.k / kStepK);
    num_steps = min(p.steps, p.k / kStepK - first_step);
    sums = reinterpret_cast<float*>(shared + p.rows * p.x_row_bytes);
    x_sums = sums + p.warps_k * p.rows * p.sum_stride;
    squares = x_sums + p.k / kStepK * 8;
    row_scales = squares + p.k / kStepK * 8;
    policy = evict_first_policy();
  }

  __device__ __forceinline__ void run() {
    Loaded loaded[kDepth];
    // No kernel writes the weights, so they are loaded while the preceding kernel is still running.
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) {
      if (i < num_steps) load(first_step + i, loaded[i]);
    }
    prefetch();
    uint4 norm[kLoads];
    if (kNorm) load_norm(threadIdx.x, norm);
    let_next_kernel_start();
    wait_for_previous_kernel();
    store_x(norm);
    const Early early = load_early();
    __syncthreads();
    float acc[4] = {};
    for (uint32_t step = 0; step < num_steps; step += kDepth) {
#pragma unroll
      for (uint32_t i = 0; i < kDepth; ++i) {
        if (step + i < num_steps) {
          multiply_step(first_step + step + i, loaded[i], acc);
          if (step + i + kDepth < num_steps) load(first_step + step + i + kDepth, loaded[i]);
        }
      }
    }
    store_sums(acc);
    if (kNorm) add_squares();
    __syncthreads();
    write_block(early);
  }

 private:
  __device__ __forceinline__ void load(uint32_t step, Loaded& to) const {
    const uint64_t at = static_cast<uint64_t>(step * 4 + t) << 4;
    to.top = load_weight(p.weight + (static_cast<uint64_t>(top_row) * p.row_units << 4) + at, policy);
    to.bottom = load_weight(p.weight + (static_cast<uint64_t>(bottom_row) * p.row_units << 4) + at, policy);
    if (kIsInt4) {
      const uint64_t group = static_cast<uint64_t>(step) * p.weight_rows;
      const uint8_t* zeros = reinterpret_cast<const uint8_t*>(p.zeros);
      to.top_scale = p.scales[group + top_row];
      to.bottom_scale = p.scales[group + bottom_row];
      to.top_zero = zeros[group + top_row];
      to.bottom_zero = zeros[group + bottom_row];
    }
  }

  // The warp's steps beyond those that it loads at once, into L2: then memory is busy too while x is waited for.
  __device__ __forceinline__ void prefetch() const {
    if (p.prefetch_bytes == 0 || num_steps <= kDepth || t > 1) return;
    const uint64_t row = t == 0 ? top_row : bottom_row;
    prefetch_l2(p.weight + (row * p.row_units << 4) + (static_cast<uint64_t>(first_step + kDepth) << 6),
                min((num_steps - kDepth) * 64, p.prefetch_bytes));
  }

  // What belongs to the pieces of x that a thread takes from `first` on.
  __device__ __forceinline__ void load_norm(uint32_t first, uint4 (&norm)[kLoads]) const {
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint32_t at = first + i * blockDim.x;
      norm[i] = make_uint4(0, 0, 0, 0);
      if (at < p.rows * (p.k / 8)) norm[i] = load_global(p.norm_weight + (at % (p.k / 8) << 4));
    }
  }

  // Stores x in shared memory and, for each step, the sum of x and of its squares. Eight or sixteen lanes have a step.
  // `norm`: what load_norm has loaded of the first pieces.
  __device__ __forceinline__ void store_x(uint4 (&norm)[kLoads]) const {
    const uint32_t pieces = p.k / 8, all = p.rows * pieces;
    // Rounded up: every lane of a warp takes part in the sums.
    for (uint32_t first = threadIdx.x; first - threadIdx.x % 32 < all; first += blockDim.x * kLoads) {
      uint4 x[kLoads];
#pragma unroll
      for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t at = first + i * blockDim.x;
        x[i] = make_uint4(0, 0, 0, 0);
        if (at < all) x[i] = load_global(p.x + (static_cast<uint64_t>(at) << 4));
      }
      if (kNorm && first != threadIdx.x) load_norm(first, norm);  // the first ones are there already
#pragma unroll
      for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t at = first + i * blockDim.x, row = at / pieces, piece = at % pieces, step = piece / kUnits;
        float square = 0, sum = 0;
        if (kNorm) square = sum_of_squares(x[i]);
        if (kNorm) x[i] = times(x[i], norm[i]);
        if (kIsInt4) sum = sum_of(x[i]);
        if (kIsFp8) x[i] = pair_for_fp8(x[i]);
        if (at < all) {
          const uint32_t unit = piece % kUnits, place = step * kUnits + unit % kPieces * 4 + unit / kPieces;
          *reinterpret_cast<uint4*>(shared + row * p.x_row_bytes + place * 16) = x[i];
        }
#pragma unroll
        for (uint32_t mask = 1; mask < kUnits; mask *= 2) {
          if (kNorm) square += __shfl_xor_sync(0xffffffffu, square, mask);
          if (kIsInt4) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        }
        if (at < all && piece % kUnits == 0) {
          if (kNorm) squares[step * 8 + row] = square;
          if (kIsInt4) x_sums[step * 8 + row] = sum;
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_step(uint32_t step, const Loaded& loaded, float (&acc)[4]) const {
    const uint32_t x_row = min(g, p.rows - 1);  // past the last row that one is repeated; the sums are not stored
    const uint32_t from = shared_address(shared) + x_row * p.x_row_bytes + step * kUnits * 16 + t * 16;
    const uint32_t top[4] = {loaded.top.x, loaded.top.y, loaded.top.z, loaded.top.w};
    const uint32_t bottom[4] = {loaded.bottom.x, loaded.bottom.y, loaded.bottom.z, loaded.bottom.w};
    float part[4] = {}, other[4] = {};  // two sums, so that half as many products wait for the one before
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      const uint4 x = load_shared(from + piece * 64);
      const uint4 a = numbers(top, piece), b = numbers(bottom, piece);
      multiply(part, a.x, b.x, a.y, b.y, x.x, x.y);
      multiply(other, a.z, b.z, a.w, b.w, x.z, x.w);
    }
    if constexpr (kIsInt4) {
      const float top_zero = int4_zero(loaded.top_zero), bottom_zero = int4_zero(loaded.bottom_zero);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float x_sum = x_sums[step * 8 + t * 2 + column];
        acc[column] = fmaf(loaded.top_scale, fmaf(-top_zero, x_sum, part[column] + other[column]), acc[column]);
        acc[2 + column] =
            fmaf(loaded.bottom_scale, fmaf(-bottom_zero, x_sum, part[2 + column] + other[2 + column]), acc[2 + column]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[i] += part[i] + other[i];
    }
  }

  // The eight numbers of a lane's piece, as bfloat16.
  static __device__ __forceinline__ uint4 numbers(const uint32_t (&words)[4], uint32_t piece) {
    if constexpr (kIsInt4) {
      const uint32_t word = words[piece];
      return make_uint4(int4_pair(word), int4_pair(word >> 4), int4_pair(word >> 8), int4_pair(word >> 12));
    } else {
      const uint32_t low = words[piece * 2], high = words[piece * 2 + 1];
      return make_uint4(even_fp8(low), odd_fp8(low), even_fp8(high), odd_fp8(high));
    }
  }

  __device__ __forceinline__ void store_sums(const float (&acc)[4]) const {
    float* to = sums + warp_k * p.rows * p.sum_stride + warp_n * 16 + g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = t * 2 + i % 2;
      if (row < p.rows) to[row * p.sum_stride + i / 2 * 8] = acc[i];
    }
  }

  // What each row's sums are multiplied with because of the norm. A warp computes it for one row at a time.
  __device__ __forceinline__ void add_squares() const {
    const uint32_t lane = g * 4 + t;
    for (uint32_t row = threadIdx.x / 32; row < p.rows; row += blockDim.x / 32) {
      float sum = 0;
      for (uint32_t step = lane; step < p.k / kStepK; step += 32) sum += squares[step * 8 + row];
#pragma unroll
      for (uint32_t mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane == 0) row_scales[row] = rsqrtf(sum / static_cast<float>(p.k) + p.eps);
    }
  }

  // What belongs to a thread's first output, loaded before the sums are known.
  struct Early {
    float residual = 0, scale = 1, up_scale = 1;
  };

  __device__ __forceinline__ uint32_t block_outs() const { return p.block_rows >> p.gated; }

  __device__ __forceinline__ void load_scales(uint32_t n, Early& early) const {
    if (kIsFp8) {
      early.scale = p.scales[n] * as_float(kLargeFloat);
      if (p.gated) early.up_scale = p.scales[p.num_out + n] * as_float(kLargeFloat);
    }
  }

  __device__ __forceinline__ Early load_early() const {
    const uint32_t row = threadIdx.x / block_outs(), n = blockIdx.x * block_outs() + threadIdx.x % block_outs();
    Early early;
    if (row < p.rows && n < p.num_out) {
      if (p.residual != nullptr) early.residual = widen(p.residual[static_cast<uint64_t>(row) * p.num_out + n]);
      load_scales(n, early);
    }
    return early;
  }

  __device__ __forceinline__ float total(const float* from) const {
    float sum = 0;
    for (uint32_t warp = 0; warp < p.warps_k; ++warp) sum += from[warp * p.rows * p.sum_stride];
    return sum;
  }

  __device__ __forceinline__ void write_block(Early early) const {
    const uint32_t outs = block_outs();
    for (uint32_t index = threadIdx.x; index < p.rows * outs; index += blockDim.x) {
      const uint32_t row = index / outs, column = index % outs, n = blockIdx.x * outs + column;
      if (n >= p.num_out) continue;
      const bool first = index < blockDim.x;
      const float* from = sums + row * p.sum_stride + (p.gated ? column / 8 * 16 + column % 8 : column);
      if (!first) load_scales(n, early);
      const float scale = kNorm ? row_scales[row] : 1.0f;
      float y = total(from) * early.scale * scale;
      if (p.bias != nullptr) y += widen(p.bias[n]);
      if (p.gated) {
        float up = total(from + 8) * early.up_scale * scale;
        if (p.bias != nullptr) up += widen(p.bias[p.num_out + n]);
        y = y / (1.0f + fast_exp(-y)) * up;
      }
      const uint64_t at = static_cast<uint64_t>(row) * p.num_out + n;
      if (p.residual != nullptr) y += first ? early.residual : widen(p.residual[at]);
      p.out[at] = narrow(y);
    }
  }

  const SkinnyGemmParams& p;
  char* shared;
  uint32_t g, t, warp_k, warp_n;
  uint32_t top_row, bottom_row, first_step, num_steps;
  float *sums, *x_sums, *squares, *row_scales;
  uint64_t policy;
};

}  // namespace fenceline
